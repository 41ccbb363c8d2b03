"""Train on packed streams, in lockstep on all ranks, with one state for all ranks.

stream_loader.py    yield this rank's micro-batches, and save how far all logical streams have come
lockstep.py         let all ranks run the same steps, until the last logical stream has ended
rank_turns.py       read the rows of a rank's logical streams, in DataLoader workers if asked for
training_stream.py  make logical streams of what a user passes, and check them
"""
