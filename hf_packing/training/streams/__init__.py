"""Train on packed streams, in lockstep on all ranks, with one state for all ranks.

attach_stream.py    `attach` for a trainer whose training dataset is a stream
stream_loader.py    yield this rank's micro-batches, and save how far all logical streams have come
lockstep.py         let all ranks run the same steps, until the last logical stream has ended
dispatch.py         let the main process read for all ranks, with dispatch_batches=True
rank_turns.py       read the rows of a rank's logical streams, in DataLoader workers if asked for
source_logs.py      count what is read of each source of a mixture, and compute its logs
training_stream.py  make logical streams of what a user passes, and check them
"""
