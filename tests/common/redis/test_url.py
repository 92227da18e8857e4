from __future__ import annotations

import re
from pathlib import Path

import pytest
from redis.asyncio.connection import SSLConnection

from llamaq.common.errors import InvalidSettings
from llamaq.common.redis.url import RedisUrl, Topology, read_url
from llamaq.common.settings import QueueSettings


def test_a_url_of_one_server_has_the_options_of_redis_py() -> None:
    assert read_url("redis://user:p%40ss@host:6380/2") == RedisUrl(
        Topology.SERVER, {"username": "user", "password": "p@ss", "host": "host", "port": 6380, "db": 2}
    )
    assert read_url("unix:///run/redis+x.sock").options["path"] == "/run/redis+x.sock"


def test_a_sentinel_url_contains_hosts_master_user_and_database() -> None:
    url = read_url("redis+sentinel://user:p%2Css@one,[::1]:5000,three:26380/my%2Dmaster/3")
    assert url.topology is Topology.SENTINEL
    assert url.hosts == (("one", 26379), ("::1", 5000), ("three", 26380))
    assert url.service == "my-master"
    assert url.options == {"username": "user", "password": "p,ss", "db": 3}
    assert url.sentinel_options == {"ssl": False}


def test_sentinels_have_another_user_and_the_same_tls_options(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.touch()
    url = read_url(
        f"rediss+sentinel://:secret@one/main?ssl_ca_certs={file}&sentinel_username=u&sentinel_password=p%26q"
    )
    assert url.options == {"password": "secret", "ssl_ca_certs": str(file), "connection_class": SSLConnection}
    assert url.sentinel_options == {"ssl": True, "ssl_ca_certs": str(file), "username": "u", "password": "p&q"}


@pytest.mark.parametrize("scheme", ["rediss://one", "rediss+sentinel://one/main", "rediss+cluster://one"])
@pytest.mark.parametrize("name", ["ssl_ca_certs", "ssl_certfile", "ssl_keyfile"])
def test_a_tls_file_that_cannot_be_read_is_named_with_its_option(tmp_path: Path, scheme: str, name: str) -> None:
    with pytest.raises(InvalidSettings, match=f"{name}={tmp_path}/a b cannot be read: No such file"):
        read_url(f"{scheme}?{name}={tmp_path}/a%20b")
    with pytest.raises(InvalidSettings, match=f"{name}={tmp_path} cannot be read: Is a directory"):
        read_url(f"{scheme}?{name}={tmp_path}")


def test_a_cluster_url_contains_some_nodes() -> None:
    url = read_url("redis+cluster://user:secret@one:7000,two?socket_timeout=3")
    assert (url.topology, url.hosts) == (Topology.CLUSTER, (("one", 7000), ("two", 6379)))
    assert url.options == {"username": "user", "password": "secret", "socket_timeout": 3.0}


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("localhost:6379", "schemes"),
        ("redis+proxy://host", "is not known"),
        ("http://host", "redis\\+sentinel://"),
        ("redis://host/abc", "'abc' is not the number of a database"),
        ("redis://host/0,1", "number of a database"),
        ("redis://host/0?foo=1", "'foo' is not an option of this URL; the options are username, .*, db"),
        ("redis://host?decode_responses=true", "'decode_responses' is not an option"),
        ("redis://host?max_connections=5", "'max_connections' is not an option"),
        ("redis://host?ssl_ca_certs=/ca.pem", r"without TLS \(rediss://\)"),
        ("redis+cluster://host?db=1", "'db' is not an option"),
        ("http+cluster://host", "is not known"),
        ("redis+sentinel://host:26379", "the name that the Sentinels give"),
        ("redis+sentinel://host/main/zero", "number of a database"),
        ("redis+sentinel://,/main", "is not a host"),
        ("redis+cluster://host:many", "[Pp]ort"),
        ("redis://user:1@host:0/1", "0 is not the number of a port"),
        ("redis+cluster://one:00,[::1]:7001", "0 is not the number of a port"),
        ("redis+sentinel://one,two:0/main", "0 is not the number of a port"),
        ("redis+cluster://host/1", "only database 0"),
    ],
)
def test_the_error_of_an_invalid_url_gives_the_reason(url: str, complaint: str) -> None:
    with pytest.raises(InvalidSettings, match=complaint) as error:
        read_url(url)
    assert "LLAMAQ_REDIS_URL" in str(error.value)


@pytest.mark.parametrize("reserved", "/?#")
@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+sentinel", "redis+cluster"])
def test_a_password_with_a_reserved_character_is_refused_with_the_way_out_and_not_shown(
    scheme: str, reserved: str
) -> None:
    with pytest.raises(InvalidSettings, match=r"write %2F in place of /") as error:
        read_url(f"{scheme}://user:sec{reserved}ret@host:1/name")
    assert not {"sec", "ret"} & set(re.findall("sec|ret", str(error.value)))


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:sec@ret/word@host",
        "redis://u:p@sec?ret@host/0",
        "redis://:sec?abc=ret@host",
        "redis://u:sec#?password=ret@host",
        "redis://u:sec?x&ret=@host",
        "redis+sentinel://one,two/sec@ret",
    ],
)
def test_an_at_sign_after_the_host_is_refused_and_no_part_of_a_password_is_shown(url: str) -> None:
    with pytest.raises(InvalidSettings, match=r"write %2F .*; after the host, write %40 in place of @") as error:
        read_url(url)
    assert not {"sec", "ret"} & set(re.findall("sec|ret", str(error.value)))


@pytest.mark.parametrize("url", ["redis://host?password=a@b", "redis://host/0?password=a@b", "unix:///a@b"])
def test_an_at_sign_may_be_part_of_an_option_or_a_path(url: str) -> None:
    read_url(url)


def test_the_settings_do_not_show_the_password() -> None:
    assert "secret" not in repr(QueueSettings(redis_url="redis://user:secret@host"))


def test_a_list_of_nodes_may_contain_ipv6_addresses() -> None:
    url = read_url("redis+cluster://one:7000,[::1]:7001/0?socket_timeout=3#nothing")
    assert url.hosts == (("one", 7000), ("::1", 7001))
    assert url.options == {"socket_timeout": 3.0}
