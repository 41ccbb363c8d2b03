"""Pack streams, which are IterableDatasets, as they are read, with an exact state.

pack_stream.py  check a stream, and put the packing between the source and its readers
packed.py       pack a stream window by window
logical.py      divide a stream into logical streams, whose rows do not depend on the number of ranks
mix.py          mix streams: choose the sources of the next documents, and read them
reader.py       open a source, read about as many tokens as wanted, and know the place in the stream
shards.py       the shards of a source: their sizes, equal shares of them, and whether their files have changed
state.py        what a packed stream needs to go on, and the refusal of states of other rows
upstream.py     the private names of `datasets`
"""
