"""Steps of an epoch whose optimiser steps have so many documents, the schedule of training without packing."""

from dataclasses import dataclass

from hf_packing.errors import PackingError


@dataclass(frozen=True)
class Schedule:
    """What bounds the steps of an epoch."""

    documents: int
    fewest: int
    """Steps that the tokens need."""
    most: int
    """Steps for which there are rows."""
    world_size: int
    max_tokens: int

    def steps(self, per_step: int, accumulation: int) -> int:
        """Steps of an epoch, all of them whole steps of the optimiser, as many as training without packing has.

        Args:
            per_step: documents in a step of the optimiser; the last one of an epoch may have made up for a remainder.
            accumulation: steps between two updates of the optimiser.

        Raises:
            PackingError: so many do not fit, or so few do not suffice, with what would.
        """
        steps = -(-self.documents // per_step) * accumulation
        if self.fewest <= steps <= self.most:
            return steps
        updates = steps // accumulation
        micro_batches = f"{accumulation} x {self.world_size} micro-batches"
        if steps < self.fewest:
            why = f"{per_step} do not fit into {micro_batches} of {self.max_tokens} tokens"
            others = (-(-self.fewest // updates), self.documents // -(-self.fewest // accumulation))
        else:
            why = f"{per_step} are too few for {micro_batches} of at least one row each"
            others = (self.most // updates, -(-self.documents // max(self.most // accumulation, 1)))
        remedies = [f"max_tokens of more than {self.max_tokens}"] if steps < self.fewest else []
        if self.possible(per_step, others[0]):
            remedies.append(f"gradient_accumulation_steps of {others[0]}")
        if self.possible(others[1], accumulation):
            remedies.append(f"match_documents_per_step of {others[1]}")
        hint = f"; possible is {', or '.join(remedies)}" if remedies else ""
        raise PackingError(f"match_documents_per_step: {why}, with {self.documents} documents in all{hint}")

    def possible(self, per_step: int, accumulation: int) -> bool:
        if not per_step or not accumulation:
            return False
        return self.fewest <= -(-self.documents // per_step) * accumulation <= self.most
