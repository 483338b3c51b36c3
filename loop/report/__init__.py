"""Reports of runs: what one will do, its results, and one HTML file that shows or compares runs."""
