"""Asks the user before an action that cannot be undone."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Static


class Question(ModalScreen[bool]):
    """A question with the answers yes and no. It returns whether the answer is yes."""

    DEFAULT_CSS = """
    Question { align: center middle; }
    Question > Vertical {
        width: 72; max-width: 95%; height: auto; border: round $warning; padding: 0 1; background: $surface;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "answer(True)"),
        Binding("n,escape,enter,q", "answer(False)"),
    ]

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text

    def compose(self) -> ComposeResult:
        """Return the widgets of the dialog."""
        with Vertical():
            yield Static(self.text, markup=False)
            yield Static("y: yes    n, Escape: no", markup=False)

    def action_answer(self, answer: bool) -> None:
        """Close the dialog with this answer."""
        self.dismiss(answer)
