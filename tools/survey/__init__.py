"""Survey which architectures of the installed transformers isolate packed documents, before and after patching.

measure.py         builds and patches tiny models, and compares packed documents with the same documents run separately
heads.py           compares the rows of padded batches with the same rows alone, for models with other heads
pictures.py        does so for models that see pictures, in documents with and without pictures
picture_models.py  builds tiny models that see pictures
picture_inputs.py  makes documents with pictures, and batches of them
trees.py           compares documents in rows of trees with the same documents run separately
ranks.py           compares rows on two ranks with the same rows on one rank
steps.py           trains models for a step after attach, whose proof must not refuse it
page.py            formats the results as docs/SUPPORTED_MODELS.md
"""
