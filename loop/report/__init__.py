"""Reports of runs: their results, and one HTML file that shows a run or compares two."""
