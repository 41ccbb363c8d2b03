"""Keep packed documents apart inside a model, and prove it on the model in hand.

borders.py    a model's inputs -> where segments begin and end, once for each forward
varlen.py     the attention function that transformers calls, and the choice of what runs it
segments.py   exact attention segment by segment, on any device
kernels.py    flash-attn, or torch's own variable-length attention, on CUDA
patch.py      patch_model, unpatch_model
isolation.py  the probe: change one document, look at the others
"""
