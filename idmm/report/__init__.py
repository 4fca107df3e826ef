"""Tables, figures and pages from finished files only, without torch."""
