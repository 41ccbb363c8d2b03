"""Survey which architectures of the installed transformers isolate packed documents, stock and patched.

measure.py  builds tiny models, patches them, and compares packed documents with the same documents alone
page.py     writes the results as docs/SUPPORTED_MODELS.md
"""
