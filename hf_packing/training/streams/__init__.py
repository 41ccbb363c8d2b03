"""Train on packed streams, in lockstep on all ranks, with one state for all ranks.

training_stream.py  make logical streams of what a user passes, and check them
stream_loader.py    read this rank's micro-batches, in DataLoader workers if asked for, and save how far all streams are
lockstep.py         let all ranks run the same steps, until the last logical stream has ended
"""
