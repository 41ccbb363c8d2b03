"""Survey which architectures of the installed transformers isolate packed documents, before and after patching.

measure.py  builds and patches tiny models, and compares packed documents with the same documents run separately
page.py     formats the results as docs/SUPPORTED_MODELS.md
"""
