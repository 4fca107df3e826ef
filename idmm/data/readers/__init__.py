"""One function a layout on disk: from a root to paths (or pixels), names and labels. Nothing is decoded here."""
