"""Keep packed documents apart inside a model, and prove it on the model in hand.

row.py           the packed row that a model works on, and which segments share a call
borders.py       a model's inputs -> the row, however the caller tells where segments end
feed.py          the row -> what a model's forward is given

varlen.py        the attention function that transformers calls, and the choice of what runs it
segments.py      exact attention segment by segment, on any device
one_node.py      the same as a single operator, for torch.compile
kernels.py       flash-attn 3 and 2, or torch's own variable-length attention, on CUDA

nested.py        nested arguments: where their tokens are, cutting segments out, joining them again
by_segment.py    the forward of a module that runs segment by segment
search.py        which modules have to, by experiment
trials.py        the experiments on rows that the probe does not have: longer, later, padded
differ.py        whether two outputs of a module are apart by more than rounding
replaced.py      what the forwards that are put in place of others share
give_row.py      the forward of a patched model: reads the row, and makes it the current one
checkpointing.py keeps the row for layers that run again in the backward pass
as_it_was.py     puts back what a forward leaves behind

inner.py         the model inside what PEFT, DDP or torch.compile made of it
training_mode.py training mode, with what it draws at random switched off
documents.py     random documents for a model
logits.py        its logits, and how far apart two of them are
rounding.py      how far rounding alone moves a model's logits, and what differences that explains
probe.py         random documents, together and alone
proof.py         they are apart, and each as it is alone
seen_labels.py   labels that repeat the tokens that a model sees
own_loss.py      a model's own loss, which may compare labels of one document with another
isolation.py     check_isolation: the same for any setup

route.py         ways to keep documents apart, and the one that a model has taken
find_route.py    the fastest way that is proven
twin.py          the same for a model that cannot be run, or not on long rows: found on a small one of its kind
sharded.py       models whose weights are elsewhere
installed.py     puts a route into a model, and takes it out
patch.py         patch_model, unpatch_model
tiny_model.py    tiny random models of any architecture
"""
