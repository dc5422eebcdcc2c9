"""What an LSTM cell has: the vanilla one, and the eight that lack or add one thing each."""

from typing import NamedTuple


class Cell(NamedTuple):
    """gates: those with weights, of "ifo". coupled: f = 1 - i. input_tanh, output_tanh: of z and of the cell.
    feedback: the gates also see all gates of the step before."""

    gates: str = "ifo"
    coupled: bool = False
    input_tanh: bool = True
    output_tanh: bool = True
    feedback: bool = False

    @property
    def front(self) -> int:
        """How many gates see the old cell: their blocks come first, then z, then o."""
        return len(self.gates.replace("o", ""))

    @property
    def blocks(self) -> int:
        return len(self.gates) + 1

    @property
    def seen(self) -> int:
        """What the recurrent weight sees, in widths: y, and the three gates with feedback."""
        return 4 if self.feedback else 1

    def place(self, gate: str) -> int | None:
        """Which block a gate or "z" is, or None."""
        order = self.gates.replace("o", "") + "z" + "o" * ("o" in self.gates)
        return order.index(gate) if gate in order else None


CELLS = {
    "V": Cell(),
    "NIG": Cell("fo"),
    "NFG": Cell("io"),
    "NOG": Cell("if"),
    "NIAF": Cell(input_tanh=False),
    "NOAF": Cell(output_tanh=False),
    "CIFG": Cell("io", coupled=True),
    "NP": Cell(),
    "FGR": Cell(feedback=True),
}
