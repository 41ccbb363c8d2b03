"""Make one batch, of shape [1, tokens] with the borders between its segments, from packed rows or documents."""
