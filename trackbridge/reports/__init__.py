"""Pages and reports for people. What is drawn on them, everywhere, is described in `trackbridge.panels`."""
