"""One run folder -> report.html."""
