"""Addresses: what may hold a lake and what may not, and that no credentials come in by them."""

from pathlib import Path

import pytest

from lake.errors import UsageError
from lake.storage import addresses
from lake.storage.objects import Objects
from testkit.object_store import SECRET


@pytest.mark.parametrize(
    ("uri", "scheme", "bucket", "prefix"),
    [
        ("s3://bucket", "s3", "bucket", ""),
        ("s3://bucket/", "s3", "bucket", ""),
        ("s3://my.bucket-1/a/b=c/_d~+.e/", "s3", "my.bucket-1", "a/b=c/_d~+.e"),
        ("gs://bucket/x", "gs", "bucket", "x"),
        ("az://container/x/y", "az", "container", "x/y"),
    ],
)
def test_an_address_is_taken_apart(uri: str, scheme: str, bucket: str, prefix: str) -> None:
    address = addresses.parse_address(uri)
    assert (address.scheme, address.bucket, address.prefix, address.folder) == (scheme, bucket, prefix, None)
    assert address.root == uri.rstrip("/")


def test_an_azure_account_may_stand_in_the_address() -> None:
    address = addresses.parse_address("abfss://box@acct.dfs.core.windows.net/a/b")
    assert (address.bucket, address.account, address.prefix) == ("box", "acct", "a/b")
    assert address.root == "abfss://box@acct.dfs.core.windows.net/a/b"


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://key:{SECRET.replace('/', '_')}@bucket/x",
        "s3://user@bucket/x",
        "s3://bucket:9000/x",
        "az://container@account/x",
        "abfss://box:secret@acct.dfs.core.windows.net/a",
        "s3://bucket/x?secret_access_key=" + SECRET,
        "s3://bucket/x#frag",
        "http://key:secret@host/x",
    ],
)
def test_credentials_in_an_address_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(UsageError) as error:
        Objects(uri)
    text = str(error.value)
    assert "SECRET_do-not" not in text
    assert "SECRET/do-not" not in text
    assert "key:" not in text
    assert "secret@" not in text
    assert "s3://BUCKET/PREFIX" in text


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("ftp://host/x", "`ftp://` cannot hold a lake"),
        ("file:///tmp/x", "`file://` cannot hold a lake"),
        ("S3://bucket/x", "`S3://` cannot hold a lake"),
        ("s3://", "names no bucket"),
        ("s3:///x", "names no bucket"),
        ("s3://-bucket/x", "is not a bucket name"),
        ("s3://buck et/x", "is not a bucket name"),
        ("s3://bucket/a//b", "cannot be a part"),
        ("s3://bucket/a/../b", "'..' cannot be a part"),
        ("s3://bucket/./b", "'.' cannot be a part"),
        ("s3://bucket/a b", "'a b' cannot be a part"),
        ("s3://bucket/a%20b", "'a%20b' cannot be a part"),
        ("s3://bucket/\u00e9", "cannot be a part"),
        ("abfss://box/x", "names no account"),
        ("", "path is empty"),
        ("  ", "path is empty"),
        ("/tmp/a%20b", "'%20'"),
        ("/tmp/a[b]", "'['"),
        ("/tmp/a\x00b", "path"),
    ],
)
def test_an_address_that_cannot_hold_a_lake_is_refused(uri: str, says: str) -> None:
    with pytest.raises(UsageError) as error:
        addresses.parse_address(uri)
    assert says in str(error.value)


def test_a_uri_that_became_a_path_is_not_taken_for_a_folder() -> None:
    with pytest.raises(UsageError, match="as text"):
        addresses.parse_address(Path("s3://bucket/x"))


def test_a_local_address_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert addresses.parse_address("some lake").root == str(tmp_path / "some lake")
    assert addresses.parse_address(Path("x")).folder == tmp_path / "x"
