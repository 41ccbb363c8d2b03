"""What a person looks at: what packing does for documents, as a table, a sentence and a page; and the command's jobs.

documents.py           rows from files, folders, saved datasets or the hub, and what could not be read
rendering.py           a row -> the text that is tokenised
tokenise.py            texts -> tokens
corpus.py              documents, rendered and tokenised block by block
summary_of_lengths.py  how long documents are
work.py                how long steps take, counted: padded, packed, and what ranks wait for
sample.py              what pictures need of a plan
recommend.py           which strategy to take, and why
report.py              packing_report
tables.py              a report as tables
plots.py               its pictures, light and dark
page.py                its HTML page
names.py               strategies by name
packed_dataset.py      documents -> a packed dataset on disk, resumable
checked_model.py       whether a model keeps documents apart, by its name
"""
