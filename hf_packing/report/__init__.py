"""The packing report: what packing does for your documents, as a table, a recommendation and an HTML page.

work.py        counts the work of an epoch: padded, packed, and how long ranks wait
figures.py     all numbers of a report
recommend.py   recommends a strategy, with the reason
tables.py      the report as tables
plots.py       the pictures of the report, light and dark
page.py        the report as an HTML page
report.py      packing_report
"""
