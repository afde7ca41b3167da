"""Pages of other people, with our outputs in them: nbconvert, JupyterLab, VS Code, a style sheet that touches all.

An output is what Jupyter stores: MIME type -> text, as IPython's formatter makes it of an object. Each host shows the
outputs in order, each in an element that :data:`Host.exhibits` finds.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
from IPython.core.formatters import DisplayFormatter
from nbformat.sign import NotebookNotary

__all__ = ["FILES", "OURS", "Host", "jupyterlab", "nbconverted", "notebook_of", "outputs_of"]

OURS = ".jp-OutputArea-output:has(svg.kvlab), .jp-OutputArea-output:has(.kvlab-view)"
"""The outputs of a notebook, in nbconvert's pages and in JupyterLab, that hold something of ours."""


@dataclass(frozen=True)
class Host:
    """A page as text, the preference of its reader, whether it is dark, and the selector of what holds our outputs."""

    html: str
    prefers: str
    dark: bool
    exhibits: str


def outputs_of(objects: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """What a kernel sends for each object, whether it lets itself be formatted or displays itself."""
    formatter, found = DisplayFormatter(), {}
    for name, shown in objects.items():
        kept: list[dict[str, str]] = []
        with mock.patch("IPython.display.display", lambda data, raw, kept=kept: kept.append(data)):
            data, _ = formatter.format(shown)
        (found[name],) = kept or [data]
    return found


def notebook_of(outputs: Mapping[str, dict[str, str]]) -> Any:
    """A notebook that was run: a cell for each output."""
    cells = [
        nbformat.v4.new_code_cell(
            name, execution_count=1, outputs=[nbformat.v4.new_output("execute_result", data, execution_count=1)]
        )
        for name, data in outputs.items()
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})


def nbconvert(theme: str, prefers: str) -> Any:
    def page(outputs: Mapping[str, dict[str, str]]) -> Host:
        shown = ".jp-OutputArea-output.jp-OutputArea-executeResult"
        return Host(nbconverted(notebook_of(outputs), theme), prefers, theme == "dark", shown)

    return page


def nbconverted(notebook: Any, theme: str) -> str:
    """The page that nbconvert makes of a notebook with outputs."""
    from nbconvert import HTMLExporter

    text: str = HTMLExporter(theme=theme).from_notebook_node(notebook)[0]
    return text


def web(style: str, prefers: str, head: str = "", body: str = "", dark: bool = False) -> Any:
    def page(outputs: Mapping[str, dict[str, str]]) -> Host:
        shown = "".join(f'<div class="output_container"><div class="output">{o["text/html"]}</div></div>'
                        for o in outputs.values() if "text/html" in o)
        text = (
            f"<!doctype html><html><head><meta charset=utf-8>{head}<style>{style}</style></head>"
            f'<body {body}><div id="container" class="content">{shown}</div></body></html>'
        )
        return Host(text, prefers, dark, ".output")

    return page


# The variables, the defaults of a webview and the table rules of VS Code's notebooks, dark and light.
_VSCODE = """
html{{--vscode-editor-background:{ground};--vscode-editor-foreground:{ink};--vscode-foreground:{ink};
--vscode-font-family:"Segoe WPC","Segoe UI",sans-serif;--vscode-font-size:13px;--vscode-font-weight:normal;
--vscode-editor-font-family:Consolas,monospace;--vscode-textLink-foreground:#4daafc;
--vscode-textPreformat-foreground:#d0d0d0;--vscode-textPreformat-background:#3c3c3c;background:{ground}}}
body{{background-color:transparent;color:var(--vscode-editor-foreground);font-family:var(--vscode-font-family);
font-weight:var(--vscode-font-weight);font-size:var(--vscode-font-size);margin:0;padding:0 20px}}
code{{color:var(--vscode-textPreformat-foreground);background-color:var(--vscode-textPreformat-background)}}
#container .output{{overflow-x:auto;line-height:22px}}
table,thead,tr,th,td,tbody{{border:none;border-color:transparent;border-spacing:0;border-collapse:collapse}}
table,th,tr{{vertical-align:middle;text-align:right}}
thead{{font-weight:bold;background-color:rgba(130,130,130,0.16)}}
th,td{{padding:4px 8px}}
tr:nth-child(even){{background-color:rgba(130,130,130,0.08)}}
tbody th{{font-weight:normal}}
"""

# A site whose style sheet means its own tables and sources, and meets ours.
_SITE = """
body{background:#fff;color:#222;font:18px/2 Georgia,serif;text-align:justify;letter-spacing:1px;word-spacing:4px}
.content *{box-sizing:border-box}
.content svg,.content svg *{letter-spacing:2px;word-spacing:3px;text-transform:uppercase;font-style:italic}
.content table{display:block;width:auto;margin:2em auto;border:3px solid #c00;font-size:20px;background:#ffe}
.content table tr td,.content table tr th{text-align:right;padding:12px;border:2px dashed #0a0;white-space:nowrap}
.content table tr:nth-child(odd) td{background:#ccf}
.content table tr:hover td{background:#ff0;color:#f0f}
.content div div pre{background:#272822;color:#f8f8f2;padding:20px;margin:20px;border-radius:9px;font-size:18px}
.content b{color:#0c0;font-size:30px}.content i,.content s{color:#c0c;font-size:30px}
.content span,.content div{line-height:2.5;text-align:center;text-indent:2em}
"""
_BOTH = '<meta name="color-scheme" content="light dark">'

# Hosts that are files. The reader's preference is the opposite of the theme where the host says its theme itself.
FILES = {
    "plain page": web("", "light"),
    "plain page, dark": web("", "dark", _BOTH, dark=True),
    "plain page that knows no dark": web("", "dark"),
    "nbconvert": nbconvert("light", "dark"),
    "nbconvert, dark": nbconvert("dark", "light"),
    "VS Code, dark": web(
        _VSCODE.format(ground="#1f1f1f", ink="#cccccc"), "light", body='class="vscode-dark"', dark=True
    ),
    "VS Code, light": web(_VSCODE.format(ground="#ffffff", ink="#3b3b3b"), "dark", body='class="vscode-light"'),
    "site": web(_SITE, "light"),
}


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """A JupyterLab over ``folder/notebooks`` on a port of its own, with nothing of the user's; yields its address.

    The notebooks that are there when it starts are trusted.
    """
    home = folder / "home"
    _settings(home)
    runtime = Path(tempfile.mkdtemp(prefix="kvlab-"))  # the names of sockets must be short
    notary = NotebookNotary(data_dir=str(home / "data"))
    for path in (folder / "notebooks").glob("*.ipynb"):
        notary.sign(nbformat.read(path, as_version=4))
    notary.store.close()
    environment = {
        **os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "HOME": str(home), "JUPYTER_NO_CONFIG": "1",
        "JUPYTER_DATA_DIR": str(home / "data"), "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", f"--port={port}",
        f"--ServerApp.root_dir={folder / 'notebooks'}", "--IdentityProvider.token=", "--ServerApp.password=",
        "--LabApp.expose_app_in_browser=True", "--LabApp.news_url=",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
        "--KernelManager.transport=ipc",  # of free ports, another process may take one first
    ]
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        yield _address(server, runtime, folder / "server.log")
    finally:
        _stop(server)
        shutil.rmtree(runtime, ignore_errors=True)


def _settings(home: Path) -> None:
    """No questions, no news; every cell of a notebook is there, also those out of sight."""
    settings = home / "settings" / "@jupyterlab"
    files = {
        settings / "notebook-extension" / "tracker.jupyterlab-settings": {"windowingMode": "none"},
        settings / "apputils-extension" / "notification.jupyterlab-settings": {
            "fetchNews": "false", "checkForUpdates": False,
        },
    }
    for path, values in files.items():
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values))
    (home / "data").mkdir()


def _address(server: subprocess.Popen[bytes], runtime: Path, log: Path, patience: float = 240.0) -> str:
    """The address that the server itself writes down: another process may have taken the port that was free."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        for path in runtime.glob(f"jpserver-{server.pid}.json"):
            try:
                url: str = json.loads(path.read_text())["url"]
                with urllib.request.urlopen(f"{url}api", timeout=5):
                    return url
            except (OSError, ValueError):
                pass  # half written, or not listening yet
        time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text(errors='replace')[-3000:]}")


def _stop(server: subprocess.Popen[bytes]) -> None:
    """The server and the kernels it started, which are of its session."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, how)
            server.wait(15)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    server.wait()
