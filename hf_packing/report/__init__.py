"""What a person looks at: what packing does for documents, as a table, a sentence and a page.

work.py        the work of an epoch, counted: padded, packed, and how long ranks wait
figures.py     everything that a report counts
recommend.py   which strategy to take, and why
tables.py      a report as tables
plots.py       its pictures, light and dark
page.py        its HTML page
report.py      packing_report
"""
