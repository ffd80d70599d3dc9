"""The cluster's control plane: etcd, kube-apiserver, kube-controller-manager and kube-scheduler."""

import http
import http.client
import json
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from .api import Api, ApiError
from .binaries import Binaries
from .layout import NODE, SERVICE_SUBNET, Layout, Ports
from .process import Piece, run
from .wait import NotYet

PLUGIN_USER = "gpu-plugin"
"""The daemon's user at the API server."""

RBAC = "/apis/rbac.authorization.k8s.io/v1"


@dataclass(frozen=True)
class Credentials:
    """Bearer tokens of one run, and the files that contain them."""

    layout: Layout
    ports: Ports
    admin: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    node: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)
    plugin: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)

    @property
    def token_file(self) -> Path:
        return self.layout.credentials / "tokens.csv"

    @property
    def service_account_key(self) -> Path:
        return self.layout.credentials / "service-account.key"

    def write(self) -> None:
        """Write the token file and the service account key, readable only by root."""
        self.layout.credentials.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.token_file.write_text(
            f'{self.admin},admin,admin,"system:masters"\n'
            f'{self.node},system:node:{NODE},{NODE},"system:nodes"\n'
            f"{self.plugin},{PLUGIN_USER},{PLUGIN_USER}\n"
        )
        run(["openssl", "genrsa", "-out", str(self.service_account_key), "2048"])

    def kubeconfig(self, user: str, token: str) -> Path:
        """Write a kubeconfig file for one user and return its path. It is JSON, which is also YAML."""
        path = self.layout.credentials / f"{user}.kubeconfig"
        cluster = {"server": f"https://127.0.0.1:{self.ports.apiserver}", "certificate-authority": str(self.layout.ca)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "e2e", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": token}}],
            "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": user}}],
            "current-context": "e2e",
        }
        path.write_text(json.dumps(content))
        return path


class Etcd(Piece):
    name: ClassVar[str] = "etcd"

    def __init__(self, layout: Layout, binaries: Binaries, ports: Ports) -> None:
        super().__init__(layout)
        self._program = binaries.etcd
        self._ports = ports

    def command(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self._ports.etcd_client, self._ports.etcd_peer))
        return [
            str(self._program),
            "--name=e2e",
            f"--data-dir={self.layout.etcd}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=e2e={peer}",
            "--unsafe-no-fsync",  # the data does not outlive the run
        ]

    def check_ready(self) -> None:
        check_http(self._ports.etcd_client, "/health", expected='"health":"true"')


class ApiServer(Piece):
    name: ClassVar[str] = "kube-apiserver"

    def __init__(self, layout: Layout, binaries: Binaries, ports: Ports, credentials: Credentials, api: Api) -> None:
        super().__init__(layout)
        self._binaries = binaries
        self._ports = ports
        self._credentials = credentials
        self._api = api

    def command(self) -> list[str]:
        key = self._credentials.service_account_key
        return [
            self._binaries.kubernetes(self.name),
            f"--etcd-servers=http://127.0.0.1:{self._ports.etcd_client}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self._ports.apiserver}",
            f"--cert-dir={self.layout.credentials}",
            f"--token-auth-file={self._credentials.token_file}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged=true",  # the value that installers set
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            f"--service-cluster-ip-range={SERVICE_SUBNET}",
            # Pods reach the server through `ServiceAddress`: the server does not listen on the address in its endpoints.
            "--endpoint-reconciler-type=none",
        ]

    def check_ready(self) -> None:
        if not self.layout.ca.exists():
            raise NotYet(f"no {self.layout.ca}")
        try:
            self._api.raw("GET", "/readyz")
        except (OSError, http.client.HTTPException, ApiError) as error:
            raise NotYet(str(error)) from error


def grant_plugin(api: Api) -> None:
    """Allow the daemon's user to read its own node and nothing else."""
    rule = {"apiGroups": [""], "resources": ["nodes"], "resourceNames": [NODE], "verbs": ["get", "list", "watch"]}
    api.create(f"{RBAC}/clusterroles", {"metadata": {"name": PLUGIN_USER}, "rules": [rule]})
    group = "rbac.authorization.k8s.io"
    api.create(
        f"{RBAC}/clusterrolebindings",
        {
            "metadata": {"name": PLUGIN_USER},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": PLUGIN_USER},
            "subjects": [{"apiGroup": group, "kind": "User", "name": PLUGIN_USER}],
        },
    )


class ControllerManager(Piece):
    """It uses the administrator's token: the tests check the node, not the controllers' permissions."""

    name: ClassVar[str] = "kube-controller-manager"

    def __init__(self, layout: Layout, binaries: Binaries, credentials: Credentials, api: Api) -> None:
        super().__init__(layout)
        self._binaries = binaries
        self._credentials = credentials
        self._api = api

    def command(self) -> list[str]:
        return [
            self._binaries.kubernetes(self.name),
            f"--kubeconfig={self._credentials.kubeconfig('admin', self._credentials.admin)}",
            f"--service-account-private-key-file={self._credentials.service_account_key}",
            f"--root-ca-file={self.layout.ca}",
            "--leader-elect=false",
            "--secure-port=0",
        ]

    def check_ready(self) -> None:
        # Without this account the API server refuses every pod.
        try:
            self._api.get("/api/v1/namespaces/default/serviceaccounts/default")
        except (OSError, ApiError) as error:
            raise NotYet(str(error)) from error


class Scheduler(Piece):
    name: ClassVar[str] = "kube-scheduler"

    def __init__(self, layout: Layout, binaries: Binaries, credentials: Credentials) -> None:
        super().__init__(layout)
        self._binaries = binaries
        self._credentials = credentials

    def command(self) -> list[str]:
        return [
            self._binaries.kubernetes(self.name),
            f"--kubeconfig={self._credentials.kubeconfig('admin', self._credentials.admin)}",
            "--leader-elect=false",
            "--secure-port=0",
        ]


def check_http(port: int, path: str, *, expected: str) -> None:
    """Raise `NotYet` unless `http://127.0.0.1:PORT/PATH` answers 200 with the `expected` text in it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise NotYet(f"port {port}: {error}") from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK or expected not in text:
        raise NotYet(f"port {port}{path} answers {answer.status}: {text[:200]}")
