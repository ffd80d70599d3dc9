"""A client of the Kubernetes API for the tests: JSON over HTTPS with an administrator's token."""

import http
import http.client
import json
import ssl
from pathlib import Path
from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as decoded JSON."""


class ApiError(Exception):
    """The API server answered with an error status."""

    def __init__(self, status: int, request: str, message: str) -> None:
        super().__init__(f"{request}: {status}: {message}")
        self.status = status
        self.message = message


class Api:
    """A client of one API server on 127.0.0.1.

    Every method raises `ApiError` for an error status, and `OSError` or `http.client.HTTPException` if no server answers.
    """

    def __init__(self, port: int, ca: Path, token: str) -> None:
        self._port = port
        self._ca = ca
        self._token = token

    def raw(self, method: str, path: str, body: Object | None = None, content_type: str = "application/json") -> str:
        """Send one request and return the text of the response."""
        context = ssl.create_default_context(cafile=str(self._ca))
        # The server signs a new certificate in every run. The certificate lacks an extension that Python 3.13 requires.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=30, context=context)
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content_type}
        try:
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= http.HTTPStatus.BAD_REQUEST:
            raise ApiError(answer.status, f"{method} {path}", _message(text))
        return text

    def get(self, path: str) -> Object:
        answer: Object = json.loads(self.raw("GET", path))
        return answer

    def create(self, path: str, body: Object) -> Object:
        answer: Object = json.loads(self.raw("POST", path, body))
        return answer

    def patch(self, path: str, body: Object) -> Object:
        """Change an object by a merge patch."""
        answer: Object = json.loads(self.raw("PATCH", path, body, "application/merge-patch+json"))
        return answer

    def delete(self, path: str, *, grace: int) -> None:
        """Delete an object. The containers of a pod are killed `grace` seconds after SIGTERM."""
        self.raw("DELETE", path, {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace})

    def exists(self, path: str) -> bool:
        try:
            self.raw("GET", path)
        except ApiError as error:
            if error.status != http.HTTPStatus.NOT_FOUND:
                raise
            return False
        return True


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
