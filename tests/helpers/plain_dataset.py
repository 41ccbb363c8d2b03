"""The least that torch accepts as a dataset."""

import torch


class Plain(torch.utils.data.Dataset):
    """Map-style, with nothing but what torch asks for."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]
