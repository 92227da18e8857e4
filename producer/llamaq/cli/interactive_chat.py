"""The conversation of `llamaq chat` on a terminal."""

from __future__ import annotations

from contextlib import suppress

import typer
from redis.exceptions import RedisError

from llamaq.cli import views
from llamaq.cli.answer_sources import Answers, Messages, Options
from llamaq.cli.error_report import explain
from llamaq.producer import ErrorCode, FinishReason, JobFailed, LlamaqError

PROMPT = "> "
ENDS = {**views.UNFINISHED, FinishReason.LENGTH: "the answer has reached max_tokens, or the end of the context"}
"""For each finish reason that cuts an answer: the notice."""


class Conversation:
    """Reads messages from the terminal and prints the answers. Each request has the whole conversation.

    Ctrl-C during an answer ends the answer. Ctrl-C at the prompt ends the conversation. When the conversation is longer
    than the context of the model, its oldest exchanges are dropped. The system message is kept. An exchange is a
    message of the user and its answer.
    """

    def __init__(self, answers: Answers, messages: Messages, options: Options) -> None:
        """Create the conversation; `run` starts it.

        Args:
            answers: Answers the requests.
            messages: The messages before the first message of the user.
            options: The job options of every request.
        """
        self._answers = answers
        self._messages = messages
        self._options = options

    def run(self) -> None:
        """Talk until Ctrl-D.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed at the prompt.
        """
        while True:
            try:
                message = input(PROMPT)
            except EOFError:
                typer.echo()
                return
            except UnicodeDecodeError as exc:
                views.notice(f"the line is not {exc.encoding}")
                continue
            if message.strip():
                self._answer(message)

    def _answer(self, message: str) -> None:
        """Print the answer to a message. If there is none, print the reason and forget the message."""
        sent = [*self._messages, {"role": "user", "content": message}]
        n_dropped = 0
        while True:
            try:
                answer = self._print_answer(sent, n_dropped)
                break
            except JobFailed as failed:
                if failed.code == ErrorCode.PROMPT_TOO_LONG and _drop_oldest_exchange(sent):
                    n_dropped += 1
                    continue
                views.notice(str(failed))
                return
            except (LlamaqError, RedisError) as error:
                views.notice(explain(error))
                return
        if answer:
            self._messages = [*sent, {"role": "assistant", "content": answer}]

    def _print_answer(self, sent: Messages, n_dropped: int) -> str:
        """Print the answer as it is generated, and return it. Ctrl-C ends it early."""
        answer, reason = "", None
        try:
            with self._answers.stream_chat(sent, self._options) as pieces:
                for piece in pieces:
                    if n_dropped and not answer:
                        _note_dropped(n_dropped)
                        n_dropped = 0
                    answer += piece
                    typer.echo(piece, nl=False)
                with suppress(LlamaqError, RedisError):
                    reason = pieces.finish_reason()
        except KeyboardInterrupt:
            pass  # the `with` block has cancelled the job
        except (LlamaqError, RedisError):
            if answer:
                typer.echo()
            raise
        typer.echo()
        if reason in ENDS:
            views.notice(ENDS[reason])
        return answer


def _drop_oldest_exchange(messages: Messages) -> bool:
    """Remove the oldest message of the user and its answer. Returns False if only the last message is left."""
    first = next(place for place, message in enumerate(messages) if message["role"] == "user")
    if first == len(messages) - 1:
        return False
    del messages[first : first + 2]
    return True


def _note_dropped(count: int) -> None:
    exchanges = "the oldest exchange was" if count == 1 else f"the {count} oldest exchanges were"
    views.notice(f"the conversation is longer than the model's context: {exchanges} dropped")
