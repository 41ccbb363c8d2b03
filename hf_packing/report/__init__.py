"""The packing report: the effect of packing on your documents, as a table, a recommendation and an HTML page.

work.py        counts the work of an epoch with padding and with packing, and how long ranks wait
figures.py     all numbers of a report
recommend.py   recommends a strategy, with the reason
tables.py      the report as text and as HTML tables
plots.py       the pictures of the report, in light and dark colors
page.py        the report as an HTML page
report.py      packing_report, which makes the report
"""
