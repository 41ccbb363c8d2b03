"""Pack streams, which are IterableDatasets, as they are read, with an exact state.

pack_stream.py      check a stream, and put the packing between the source and its readers
packed_examples.py  pack a stream window by window
logical_streams.py  divide a stream into logical streams, whose rows do not depend on the number of ranks

These files mix sources:

mix.py              mix streams, and check what is asked for
mixture.py          the way in which sources are mixed, and what counts of a document
mixture_balance.py  choose the sources of the next documents
mixture_progress.py how far a mixture is, and up to which document its shares count
mixed_examples.py   mix the documents of several sources, or of a piece of them
mixtures_in.py      find the mixture that a stream reads, and divide it among logical streams

These files read the source:

sources.py          check a stream of documents, and find its token columns
wrapped.py          read a stream as one shard after `take`; check the columns of documents without features
document_reader.py  read about as many tokens as wanted, and know the place in the stream
shares.py           divide the shards into shares of equal size, and read one share
shard_sizes.py      find the sizes of shards; notice changed files

These files save the state:

window_start.py     the start of a window, with the documents that wait for the window
saved_state.py      the layout of saved states, and the refusal of states of other rows

upstream.py         the private names of `datasets`
"""
