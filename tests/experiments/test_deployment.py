"""The registry's entry of a run: from a certificate that fits, with what a person must fill in."""

import json

import pytest
import yaml

from jaxpfl import cli, files
from jaxpfl.experiments import deployment
from jaxpfl.privacy import Guarantee, Ledger, certificate
from tests.privacy.ledgers import CLIENTS, GAUSSIAN, PLAN, charge, five_rounds
from tests.refusals import refusal

TEMPLATE = """
url_slug
deployment.basic: name data_curators description intended_use data_product_type
  data_product_region data_product_sector publication_date
deployment.dp_variant: variant_name data_domain unprotected_quantities
deployment.privacy_loss: privacy_unit privacy_unit_details number_of_privacy_units
  privacy_parameters privacy_parameters_details
deployment.deployment_model: model_name model_name_details trust_assumptions actors release_type
  release_type_details data_source_type data_source_type_details access_type access_type_details
deployment.implementation: preprocessing_and_hyperparameter_tuning mechanisms composition
  post_processing justification utility additional_information
deployment.administrative: evidence_sources status registry_authors tier
"""
"""The fields of the registry's own template, tests/good_deployments/template.yaml of its data."""


@pytest.fixture
def run(tmp_path):
    """A folder with the certificate of a private run."""
    folder = tmp_path / "My run_1"
    with Ledger(folder / "ledger.jsonl", CLIENTS) as ledger:
        five_rounds(ledger)
        statement = Guarantee.of_events([c.event for c in ledger.charges], 1e-5).statement()
    ledgers, stamp = [folder / "ledger.jsonl"], ""
    certificate.certify(
        folder, "federated_training", [PLAN], statement=statement, stamp=stamp, ledgers=ledgers
    )
    return folder


def test_a_certificate_is_verified_by_its_folder(run, capsys):
    assert cli.main(["verify", str(run)]) == 0
    assert str(run / "certificate.json") in capsys.readouterr().out


def test_it_has_the_registrys_fields_and_the_certificates_values(run, capsys):
    assert cli.main(["export", str(run), "--registry"]) == 0
    printed = capsys.readouterr()
    entry = yaml.safe_load(printed.out)
    sections, name = {}, ""
    for line in TEMPLATE.split():
        if line.endswith(":"):
            name = line.removesuffix(":").split(".")[1]
        elif name:
            sections.setdefault(name, set()).add(line)
    assert {name: set(part) for name, part in entry["deployment"].items()} == sections
    made = json.loads((run / "certificate.json").read_text())
    ledger, deployment_ = made["ledgers"][0], entry["deployment"]
    loss = deployment_["privacy_loss"]
    assert loss["privacy_parameters"] == {"epsilon": ledger["epsilon"], "delta": 1e-5}
    assert "add or remove one client, of 40" in loss["privacy_unit_details"]
    assert made["statement"] in loss["privacy_parameters_details"]
    assert "multiplier 8" in deployment_["implementation"]["mechanisms"]
    assert made["seal"] in deployment_["implementation"]["additional_information"]
    assert all(
        part in deployment_["dp_variant"]["unprotected_quantities"] for part in made["not_covered"]
    )
    assert entry["url_slug"] == "my-run-1"
    # A run that exported nothing does not say what it made.
    assert deployment_["basic"]["data_product_type"].startswith(deployment.FILL_IN)
    for name, product in (
        ("m.safetensors", "Machine learning model"),
        ("corpus/x", "Synthetic data"),
    ):
        files.write_json(
            run / "certificate.json", certificate.sealed({**made, "weights": {name: "0" * 64}})
        )
        basic = deployment.entry(run)["deployment"]["basic"]
        assert basic["data_product_type"] == product
    # Where everyone takes part, their number is private.
    query = ledger["queries"][0]
    plan = {**query["plan"], "population": None, "clients_per_round": None}
    made["ledgers"][0]["queries"] = [{**query, "plan": plan}]
    files.write_json(run / "certificate.json", certificate.sealed(made))
    implementation = deployment.entry(run)["deployment"]["implementation"]
    assert "all take part" in implementation["mechanisms"]
    # What was not charged is not claimed.
    assert "nothing of it is in the epsilon" in str([*deployment.left(entry)])
    assert f"{len([*deployment.left(entry)])} fields begin with" in printed.err


def test_of_a_selection_it_says_what_tuning_cost(run):
    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    with Ledger(run / "other.jsonl", CLIENTS) as ledger:
        charge(ledger, event=RepeatAndSelectDpEvent(GAUSSIAN(4.0), 7.0, 1.0))
        statement = Guarantee.of_events([c.event for c in ledger.charges], 1e-5).statement()
    ledgers = [run / "other.jsonl"]
    certificate.certify(run, "sweep", [PLAN], statement=statement, stamp="", ledgers=ledgers)
    tuning = deployment.entry(run)["deployment"]["implementation"]
    assert "7 on average" in tuning["preprocessing_and_hyperparameter_tuning"]


def test_of_several_ledgers_of_clients_it_names_the_epsilon_of_all(run):
    """The worlds of a study ask the same clients: one world's epsilon is not the whole."""
    for world in ("other.jsonl", "another.jsonl"):
        with Ledger(run / world, CLIENTS) as ledger:
            charge(ledger, event=GAUSSIAN(4.0))
    both = Guarantee.of_events([GAUSSIAN(4.0)] * 2, 1e-5)
    ledgers = [run / "other.jsonl", run / "another.jsonl"]
    said = both.statement()
    certificate.certify(run, "study", [PLAN], statement=said, stamp="", ledgers=ledgers)
    loss = deployment.entry(run)["deployment"]["privacy_loss"]
    assert loss["privacy_parameters"]["epsilon"] == pytest.approx(both.epsilon(), rel=2e-3)
    assert "2 ledgers together" in loss["privacy_parameters_details"]


def test_no_entry_of_what_is_altered_or_not_private(run, tmp_path):
    path = run / "certificate.json"
    made = json.loads(path.read_text())
    files.write_json(path, {**made, "statement": "(epsilon = 0.1, delta = 1e-05)"})
    refusal(lambda: deployment.entry(run), "certificate.json: changed after it was sealed")
    files.write_json(path, certificate.sealed({**made, "stamp": "NOT PRIVATE: a test"}))
    refusal(lambda: deployment.entry(run), "is of no private deployment: NOT PRIVATE: a test")
    refusal(lambda: deployment.entry(tmp_path), "certificate.json")


def test_the_command_takes_a_folder_or_the_registry(run, capsys):
    for wrong in (
        [str(run)],
        [str(run), "out", "--registry"],
        [str(run), "--registry", "--texts", "3"],
    ):
        assert cli.main(["export", *wrong]) == 2
        assert "expected RUN FOLDER" in capsys.readouterr().err
