"""The tables of the documentation are up to date, and every public field has a description."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel, TypeAdapter, ValidationError

import llamaq.common.protocol
import llamaq.producer
from llamaq.common import settings as common_settings
from llamaq.common.protocol.job_events import Tokens
from llamaq.common.protocol.job_options import JobOptions
from llamaq.common.protocol.job_outcome import JobStats
from llamaq.common.protocol.job_request import JobParams, JobRequest
from llamaq.common.protocol.sampling import SamplingDefaults
from llamaq.common.protocol.wire_model import StrictModel, WireModel
from llamaq.tools.docs_tables import __main__ as command
from llamaq.tools.docs_tables.documents import ROOT, documents, fill_in, tables_in
from llamaq.tools.docs_tables.models import MODELS
from llamaq.tools.docs_tables.table import render_table
from llamaq.worker import settings as worker_settings
from llamaq.worker.settings import WorkerSettings

DOCUMENTS = {path.name: path.read_text() for path in documents()}
BASES = (BaseModel, StrictModel, WireModel)


def models_in(module: object) -> set[type[BaseModel]]:
    members = vars(module).values()
    return {one for one in members if inspect.isclass(one) and issubclass(one, BaseModel) and one not in BASES}


def public_models() -> set[type[BaseModel]]:
    found = models_in(llamaq.producer) | models_in(common_settings) | models_in(worker_settings)
    for module in pkgutil.iter_modules(llamaq.common.protocol.__path__, "llamaq.common.protocol."):
        found |= models_in(importlib.import_module(module.name))
    return {model for model in found if model.__name__ != "BaseSettings"}


PUBLIC_MODELS: list[type[BaseModel]] = sorted(public_models(), key=lambda model: model.__name__)


def cells_of(model: type[BaseModel]) -> dict[str, dict[str, str]]:
    """Return the cells of the table of a model: a dict of fields, each with a dict of columns."""
    header, _, *lines = render_table(model, list(model.model_fields)).splitlines()
    columns = [cell.strip() for cell in header[1:-1].split("|")]
    rows = [[cell.strip() for cell in line[1:-1].split(" | ")] for line in lines]
    return {row[0].strip("`"): dict(zip(columns, row, strict=True)) for row in rows}


# ---- descriptions


@pytest.mark.parametrize("model", PUBLIC_MODELS)
def test_every_field_of_a_public_model_has_a_description_in_sentences(model: type[BaseModel]) -> None:
    assert model.__name__ in MODELS, "the model is not in `models.MODELS`"
    for name, field in model.model_fields.items():
        description = field.description or ""
        assert re.match(r"[A-Z`]", description), f"{name}: {description!r} starts with a small letter"
        assert description.endswith("."), f"{name}: {description!r} has no full stop"
        assert "[" not in description, f"{name}: the help of the command line reads brackets as markup"


@pytest.mark.parametrize("model", PUBLIC_MODELS)
def test_no_field_has_a_second_description_as_a_docstring(model: type[BaseModel]) -> None:
    fields = inspect.getsource(model).partition("\n    def ")[0].partition('"""')[2].partition('"""')[2]
    assert '"""' not in fields


def test_the_schema_of_a_request_shows_the_descriptions() -> None:
    properties = JobRequest.model_json_schema()["properties"]
    assert properties.keys() == JobRequest.model_fields.keys()
    for name, field in JobRequest.model_fields.items():
        assert properties[name]["description"] == field.description


def test_a_sampling_parameter_has_one_description_and_one_pair_of_bounds() -> None:
    for name, default in cells_of(SamplingDefaults).items():
        parameter = cells_of(JobParams)[name]
        assert (parameter["bounds"], parameter["meaning"]) == (default["bounds"], default["meaning"])
        assert parameter["default"] == f"worker's: {default['default']}"


def test_the_typed_keywords_are_the_fields_of_the_parameters_and_accept_their_defaults() -> None:
    hints = get_type_hints(JobOptions)
    assert hints.keys() == JobParams.model_fields.keys()
    for name, field in JobParams.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        if name not in SamplingDefaults.model_fields:  # their default is None, which callers do not pass
            TypeAdapter(hints[name]).validate_python(default)


# ---- tables


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_tables_of_a_document_are_up_to_date(name: str) -> None:
    assert fill_in(DOCUMENTS[name], name) == DOCUMENTS[name], "run: python -m llamaq.tools.docs_tables"


def test_the_documentation_has_every_parameter_measurement_and_setting() -> None:
    assert shown_in("jobs.md", "JobRequest") == set(JobRequest.model_fields)
    assert shown_in("jobs.md", "JobStats") == set(JobStats.model_fields)
    groups = [base.__name__ for base in WorkerSettings.__bases__]
    assert set().union(*(shown_in("settings.md", group) for group in groups)) == set(WorkerSettings.model_fields)
    own = set(common_settings.ClientSettings.model_fields) - set(common_settings.QueueSettings.model_fields)
    assert shown_in("settings.md", "ClientSettings") == own


def shown_in(document: str, model: str) -> set[str]:
    return {field for name, fields in tables_in(DOCUMENTS[document]) if name == model for field in fields}


def test_a_changed_description_makes_the_check_fail_until_the_tables_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "jobs.md"
    document.write_text("<!-- table: JobRequest max_tokens,seed -->\n| old |\n<!-- end -->\nThe text stays.\n")
    monkeypatch.setattr(command, "documents", lambda: [document])
    assert command.main(["--check"]) == 1
    assert "jobs.md: a table is not up to date" in capsys.readouterr().err
    assert "| old |" in document.read_text()
    assert command.main([]) == 0
    assert command.main(["--check"]) == 0
    lines = document.read_text().splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == ["max_tokens", "seed"]
    assert lines[-1] == "The text stays."


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("JobRequests", "page.md: there is no model JobRequests"),
        ("JobRequest max_token", "page.md: JobRequest has no field max_token"),
    ],
)
def test_a_marker_with_an_unknown_name_is_an_error(marker: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fill_in(f"<!-- table: {marker} -->\n<!-- end -->\n", "page.md")


def test_every_marker_has_the_form_of_a_table() -> None:
    for name, text in DOCUMENTS.items():
        assert text.count("<!-- table:") == text.count("<!-- end -->") == len(tables_in(text)), name
    assert (ROOT / "docs" / "settings.md").is_file()


# ---- the printed bounds and defaults are those of the models


NUMBER = r"(-?[\d,]+|2⁶³ - 1|2³¹ - 1)"


def number(text: str) -> int:
    return {"2⁶³ - 1": 2**63 - 1, "2³¹ - 1": 2**31 - 1}.get(text) or int(text.replace(",", ""))


def is_accepted(name: str, value: Any) -> bool:
    try:
        JobParams.model_validate({name: value})
    except ValidationError:
        return False
    return True


def test_parameters_are_accepted_exactly_within_their_printed_bounds() -> None:
    n_checked = 0
    for name, cells in cells_of(JobParams).items():
        closed, half_open = (
            re.fullmatch(pattern, cells["bounds"])
            for pattern in (f"{NUMBER} to {NUMBER}", f"above 0, at most {NUMBER}")
        )
        if not closed and not half_open:
            continue
        lowest = number(closed[1]) if closed else 0
        highest = number((closed or half_open or [])[2 if closed else 1])
        assert is_accepted(name, lowest) is bool(closed), name
        assert not is_accepted(name, lowest - 1), name
        assert is_accepted(name, highest), name
        assert not is_accepted(name, highest + 1), name
        n_checked += 1
    assert n_checked >= 13


def test_a_bound_of_one_is_printed_in_the_singular() -> None:
    assert cells_of(JobParams)["regex"]["bounds"] == "at least 1 character"
    assert cells_of(JobParams)["choice"]["bounds"] == "1 to 1,024 entries"


def test_a_named_tuple_is_printed_as_the_list_that_a_client_receives() -> None:
    assert cells_of(Tokens)["logprobs"]["type"] == "list of [float, list of [int, float]]"
    assert cells_of(llamaq.producer.Result)["embeddings"]["type"] == "list of [int, int, bytes]"


def test_the_printed_defaults_of_settings_are_accepted_as_their_values() -> None:
    n_checked = 0
    for name, cells in cells_of(WorkerSettings).items():
        default = cells["default"].strip("`")
        if default in ("not set", "empty", "computed") or default.endswith(" MiB"):
            continue
        assert getattr(WorkerSettings.model_validate({name: default}), name) == getattr(WorkerSettings(), name), name
        n_checked += 1
    assert n_checked >= 30
