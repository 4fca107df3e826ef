"""The style of all figures, and figures that several packages draw."""
