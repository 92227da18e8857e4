"""Jobs of RQ: single generations as RQ jobs, and bulk runs that RQ workers execute."""

from __future__ import annotations

from llamaq.producer.rq.generation import cancel_job, chat, generate

__all__ = ["cancel_job", "chat", "generate"]
