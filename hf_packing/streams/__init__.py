"""Pack streams, which are IterableDatasets, as they are read, with an exact state.

packed.py    plan and make rows window by window
logical.py   the packed rows of a stream, in logical streams that do not depend on the number of ranks
mix.py       mix streams: choose the sources of the next documents, and read them
reader.py    open a source or a share of its shards, read about as many tokens as wanted, and keep the place
state.py     the objects that `datasets` reads, their states, and the refusal of states of other rows
"""
