"""Names of the files in the folder of a study."""

RESULTS = "results.json"  # holds every run
REPORT = "report.html"  # the page
