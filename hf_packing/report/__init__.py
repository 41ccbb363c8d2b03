"""The packing report: the effect of packing on your documents, as a table, a recommendation and an HTML page.

work.py        counts the work of an epoch with padding and with packing, and how long ranks wait
figures.py     all numbers of a report
plots.py       the picture of the report, in light and dark colors
render.py      the report as text, as HTML for notebooks and as a page, with the templates beside it
report.py      packing_report, which makes the report and recommends a strategy, with the reason
"""
