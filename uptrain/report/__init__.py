"""Reports of runs: history, status, curves, figures and the HTML page."""
