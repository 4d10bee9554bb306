"""GGUF files of LM Studio's and Ollama's folders, which `lowtide ls` shows and nothing changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lowtide.cli.app import app
from lowtide.model_folder.other_programs import other_files

DIGEST = "ab" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    return tmp_path


def put(path: Path, content: bytes = b"GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def put_ollama(models: Path, name: str, layers: Any) -> None:
    put(models / "manifests" / name, json.dumps({"layers": layers}).encode())


def model_layer(digest: str) -> dict[str, str]:
    return {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}


def test_each_model_is_found_once_by_its_programs_name(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    studio = home / ".lmstudio" / "models" / "maker"
    one = put(studio / "Small-GGUF" / "Small-Q4_K_M.gguf")
    parts = [put(studio / "Large-GGUF" / f"Large-Q8_0-0000{n}-of-00002.gguf") for n in (1, 2)]
    put(studio / "Small-GGUF" / "mmproj-Small.gguf")
    put(studio / "Small-GGUF" / "README.md")
    put(studio / "loose.gguf")
    old = put(home / ".cache" / "lm-studio" / "models" / "maker" / "Old-GGUF" / "Old-Q4_0.gguf")
    models = home / "elsewhere"
    monkeypatch.setenv("OLLAMA_MODELS", str(models))
    blob = put(models / "blobs" / f"sha256-{DIGEST}", b"GGUF" * 3)
    place = "registry.ollama.ai/library"
    other = {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{DIGEST}"}
    put_ollama(models, f"{place}/qwen3/30b", [other, model_layer(DIGEST)])
    put_ollama(models, f"{place}/qwen3/latest", [model_layer(DIGEST)])
    put_ollama(models, f"{place}/gone/latest", [model_layer("cd" * 32)])
    put_ollama(models, f"{place}/odd/latest", [model_layer("../../secret"), 5, None])
    put(models / "manifests" / place / "broken" / "latest", b"{")
    found = other_files()
    assert [(each.program, each.name, each.path, each.num_bytes) for each in found] == [
        ("LM Studio", "maker/Large-GGUF: Large-Q8_0", parts[0], 8),
        ("LM Studio", "maker/Old-GGUF: Old-Q4_0", old, 4),
        ("LM Studio", "maker/Small-GGUF: Small-Q4_K_M", one, 4),
        ("Ollama", "qwen3:30b", blob, 12),
    ]


def test_ls_shows_them_and_where_it_looked(home: Path) -> None:
    path = put(home / ".lmstudio" / "models" / "maker" / "Small" / "Small-Q4_0.gguf")
    before = {p: p.stat().st_mtime_ns for p in home.rglob("*")}
    result = CliRunner().invoke(app, ["ls"])
    assert result.exit_code == 0 and str(path) in result.stdout
    assert "LM Studio" in result.stdout and f"{home}/.lmstudio/models" in result.stderr
    told = json.loads(CliRunner().invoke(app, ["ls", "--json"]).stdout)
    assert [row["path"] for row in told["files"]] == [str(path)]
    assert str(home / ".ollama" / "models") in told["looked_in"]
    assert {p: p.stat().st_mtime_ns for p in before} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all folders")
def test_a_folder_of_another_user_is_left_out(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    put(folder / "maker" / "Small" / "Small-Q4_0.gguf")
    (folder / "maker").chmod(0)
    try:
        assert other_files() == []
    finally:
        (folder / "maker").chmod(0o700)
