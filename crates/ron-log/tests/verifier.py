"""A second verifier of the registry's formats, written from docs/registry-format.md alone.

Standard library only, and slow on purpose: nothing here is shared with the Rust crate. ML-DSA-44 is not
implemented; a log whose quorum needs it is refused, not believed.

    verifier.py vectors FILE        checks every frozen vector
    verifier.py flip FILE SEED N    flips N random bits in each stored part of the vectors' log; all must be found
    verifier.py export FILE ROOTS_B3 [LOG_KEY]
    verifier.py proof FILE ROOTS LOG_KEY
"""

import base64
import hashlib
import json
import random
import struct
import sys


class Fault(Exception):
    pass


def need(condition, what):
    if not condition:
        raise Fault(what)


def strict(check):
    """What has another shape than the check takes for granted is a fault too."""

    def checked(*given):
        try:
            return check(*given)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, struct.error) as bad:
            raise Fault(f"malformed: {bad!r}")

    return checked


# --- BLAKE3 ---------------------------------------------------------------------------------------------------

IV = [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19]
ORDER = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
COLUMNS = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
DIAGONALS = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
START, END, PARENT, ROOT = 1, 2, 4, 8
M32 = 0xFFFFFFFF


def compress(cv, block, counter, length, flags):
    s = cv + IV[:4] + [counter & M32, counter >> 32, length, flags]
    m = list(struct.unpack("<16I", block))
    for turn in range(7):
        for index, (a, b, c, d) in enumerate(COLUMNS + DIAGONALS):
            for word, right_d, right_b in ((m[2 * index], 16, 12), (m[2 * index + 1], 8, 7)):
                s[a] = (s[a] + s[b] + word) & M32
                x = s[d] ^ s[a]
                s[d] = (x >> right_d | x << (32 - right_d)) & M32
                s[c] = (s[c] + s[d]) & M32
                x = s[b] ^ s[c]
                s[b] = (x >> right_b | x << (32 - right_b)) & M32
        m = [m[i] for i in ORDER]
    return [s[i] ^ s[i + 8] for i in range(8)]


def blake3(data):
    """BLAKE3-256: chunks of 1024 bytes, then a binary tree of which the left side is the largest power of two."""

    def chunk(part, counter, root):
        cv = IV
        blocks = [part[i : i + 64] for i in range(0, len(part), 64)] or [b""]
        for number, block in enumerate(blocks):
            flags = (START if number == 0 else 0) | (END | root if number == len(blocks) - 1 else 0)
            cv = compress(cv, block.ljust(64, b"\0"), counter, len(block), flags)
        return cv

    def subtree(first, count, root):
        if count == 1:
            return chunk(data[first * 1024 : (first + 1) * 1024], first, root)
        left = 1
        while left * 2 < count:
            left *= 2
        words = subtree(first, left, 0) + subtree(first + left, count - left, 0)
        return compress(IV, struct.pack("<16I", *words), 0, 64, PARENT | root)

    return struct.pack("<8I", *subtree(0, max(1, -(-len(data) // 1024)), ROOT))


def b3(data):
    return "b3:" + blake3(data).hex()


# --- Ed25519, strictly ----------------------------------------------------------------------------------------

P = 2**255 - 19
L = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, P - 2, P) % P


def add(p, q):
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % P, (p[1] + p[0]) * (q[1] + q[0]) % P
    c, d = 2 * p[3] * q[3] * D % P, 2 * p[2] * q[2] % P
    e, f, g, h = b - a, d - c, d + c, b + a
    return (e * f % P, g * h % P, f * g % P, e * h % P)


def multiply(scalar, point):
    result = (0, 1, 1, 0)
    while scalar:
        if scalar & 1:
            result = add(result, point)
        point = add(point, point)
        scalar >>= 1
    return result


def same(p, q):
    return (p[0] * q[2] - q[0] * p[2]) % P == 0 and (p[1] * q[2] - q[1] * p[2]) % P == 0


def decompress(data):
    y = int.from_bytes(data, "little")
    sign, y = y >> 255, y & (2**255 - 1)
    if y >= P:
        return None
    square = (y * y - 1) * pow(D * y * y + 1, P - 2, P) % P
    x = pow(square, (P + 3) // 8, P)
    if (x * x - square) % P:
        x = x * pow(2, (P - 1) // 4, P) % P
    if (x * x - square) % P or (x == 0 and sign):
        return None
    x = P - x if x & 1 != sign else x
    return (x, y, 1, x * y % P)


BASE = decompress((4 * pow(5, P - 2, P) % P).to_bytes(32, "little"))


def verify(key, message, signature):
    if len(signature) != 64:
        return False
    a, r = decompress(key), decompress(signature[:32])
    s = int.from_bytes(signature[32:], "little")
    if a is None or r is None or s >= L:
        return False
    if any(same(multiply(8, point), (0, 1, 1, 0)) for point in (a, r)):
        return False
    k = int.from_bytes(hashlib.sha512(signature[:32] + key + message).digest(), "little") % L
    return same(multiply(s, BASE), add(r, multiply(k, a)))


def b64(text, length=None):
    try:
        data = base64.b64decode(text, validate=True)
    except Exception:
        raise Fault("not base64")
    need(base64.b64encode(data).decode() == text, "base64 is not in its one form")
    need(length is None or len(data) == length, "of another length")
    return data


def public_key(text):
    name, _, encoded = text.partition(":")
    if name != "ed25519":
        return None
    data = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4))
    need(len(data) == 32 and base64.urlsafe_b64encode(data).decode().rstrip("=") == encoded, "a bad key")
    return data


# --- canonical JSON -------------------------------------------------------------------------------------------


def number(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        need(abs(value) < 2**53, "an integer beyond 2^53")
        return str(value)
    need(abs(value) < 2**53, "a number beyond 2^53")
    if value == int(value):
        return str(int(value))
    for precision in range(17):
        digits, _, exponent = format(abs(value), f".{precision}e").partition("e")
        if float(f"{digits}e{exponent}") == abs(value):
            break
    digits, point = digits.replace(".", ""), int(exponent) + 1
    sign = "-" if value < 0 else ""
    if 0 < point <= 21:
        return sign + digits[:point] + "." + digits[point:]
    if -6 < point <= 0:
        return sign + "0." + "0" * -point + digits
    mantissa = digits[0] + ("." + digits[1:] if digits[1:] else "")
    return f"{sign}{mantissa}e{point - 1:+d}"


def canonical(value):
    if value is None:
        return "null"
    if isinstance(value, (bool, int, float)):
        return number(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ",".join(map(canonical, value)) + "]"
    names = sorted(value, key=lambda name: name.encode("utf-16-be"))
    return "{" + ",".join(canonical(name) + ":" + canonical(value[name]) for name in names) + "}"


def depth(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(depth, inner), default=0)


def parse(data):
    def members(pairs):
        need(len(dict(pairs)) == len(pairs), "a member occurs twice")
        return dict(pairs)

    def refuse(text):
        raise Fault(text + " is no JSON")

    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=members, parse_constant=refuse)
        need(depth(value) <= 32, "nested too deeply")
        canonical(value).encode("utf-8")
        return value
    except (ValueError, RecursionError, OverflowError) as bad:
        raise Fault(f"not JSON: {bad}")


def parse_canonical(data):
    value = parse(data)
    need(canonical(value).encode() == data, "not canonical")
    return value


def exactly(value, names, optional=()):
    need(isinstance(value, dict), "not an object")
    need(set(names) <= set(value) <= set(names) | set(optional), "other members than its schema's")


def whole(*values):
    for value in values:
        need(type(value) is int and 0 <= value < 2**53, "not an integer from 0 to 2^53 - 1")


# --- signers and payloads -------------------------------------------------------------------------------------


def signer_set(value):
    exactly(value, ["threshold", "signers"], ["allow_minority"])
    whole(value["threshold"])
    keys, approvers, found = [], 0, {}
    for signer in value["signers"]:
        exactly(signer, ["id", "keys", "roles"], ["not_after"])
        need(signer["id"] not in found, "a signer twice")
        keys += signer["keys"]
        approvers += "approve" in signer["roles"]
        found[signer["id"]] = signer
    need(len(set(keys)) == len(keys), "a key twice")
    need(1 <= value["threshold"] <= approvers, "a threshold nobody meets")
    need(value["threshold"] * 2 > approvers or value.get("allow_minority") is True, "a minority")
    return {"threshold": value["threshold"], "signers": found}


def read_payload(data):
    need(len(data) <= (1 << 20) - (64 << 10), "too large")
    payload = parse_canonical(data)
    exactly(payload, ["schema", "base_version", "signers_version", "nonce", "ops", "note", "expires_at"])
    need(payload["schema"] == "ron.registry/1", "another schema")
    whole(payload["base_version"], payload["signers_version"], payload["expires_at"])
    need(len(payload["nonce"]) == 32 and not set(payload["nonce"]) - set("0123456789abcdef"), "a bad nonce")
    need(isinstance(payload["note"], str) and 1 <= len(payload["ops"]) <= 1024, "bad members")
    keys = []
    for op in payload["ops"]:
        exactly(op, ["op", "kind", "id"] + (["body"] if op.get("op") == "put" else []))
        need(op["op"] in ("put", "delete"), "no such operation")
        known = ("signers", "route", "tenant", "upstream", "origin", "pack", "peer")
        need(op["kind"] in known or op["kind"].startswith("x-"), "no such kind")
        if op["kind"] == "signers":
            need(op["op"] == "put" and op["id"] == "main", "the signer set is always there")
            signer_set(op["body"])
        keys.append((op["kind"], op["id"]))
    need(len(set(keys)) == len(keys), "an item twice")
    return payload


def judge(record, payload, in_force):
    """Every approval must be good and count in the old set or the new one, and both must be met."""
    new = [signer_set(op["body"]) for op in payload["ops"] if op["kind"] == "signers"]
    sets = [in_force] + new
    have = [0] * len(sets)
    message = b"ron:svc-registry:v1\n" + record["payload_b3"].encode()
    names = [approval["signer"] for approval in record["approvals"]]
    need(names == sorted(set(names), key=str.encode), "approvals out of order or twice")
    for approval in record["approvals"]:
        exactly(approval, ["signer", "alg", "sig", "signed_at"])
        whole(approval["signed_at"])
        need(approval["alg"] == "ed25519", "an algorithm this verifier does not know")
        signature, counts = b64(approval["sig"], 64), False
        for index, one in enumerate(sets):
            signer = one["signers"].get(approval["signer"])
            if signer is None or "approve" not in signer["roles"] or len(signer["keys"]) != 1:
                continue
            if record["committed_at"] > signer.get("not_after", 2**53):
                continue
            key = public_key(signer["keys"][0])
            if key is not None and cached_verify(key, message, signature):
                have[index] += 1
                counts = True
        need(counts, f"the approval by {approval['signer']} does not count")
    need(all(count >= one["threshold"] for count, one in zip(have, sets)), "no quorum")


SEEN = {}


def cached_verify(*given):
    if given not in SEEN:
        SEEN[given] = verify(*given)
    return SEEN[given]


# --- the tree -------------------------------------------------------------------------------------------------


def leaf_hash(record):
    return hashlib.sha256(b"\0" + record).digest()


def tree_root(leaves):
    if not leaves:
        return hashlib.sha256(b"").digest()
    if len(leaves) == 1:
        return leaves[0]
    split = 1
    while split * 2 < len(leaves):
        split *= 2
    return hashlib.sha256(b"\1" + tree_root(leaves[:split]) + tree_root(leaves[split:])).digest()


def included(leaf, index, size, path):
    """The root that an audit path leads to, RFC 9162 section 2.1.3.2."""
    need(index < size, "beyond the tree")
    node, at, last = leaf, index, size - 1
    for sibling in path:
        need(last > 0, "a path too long")
        if at & 1 or at == last:
            node = hashlib.sha256(b"\1" + sibling + node).digest()
            while not at & 1 and at:
                at, last = at >> 1, last >> 1
        else:
            node = hashlib.sha256(b"\1" + node + sibling).digest()
        at, last = at >> 1, last >> 1
    need(last == 0, "a path too short")
    return node


# --- notes ----------------------------------------------------------------------------------------------------


def note_key(line):
    name, key_id, encoded = line.split("+", 2)
    data = b64(encoded, 33)
    need(hashlib.sha256(name.encode() + b"\n" + data).digest()[:4].hex() == key_id, "a key id of another key")
    return name, bytes.fromhex(key_id), data[0], data[1:]


@strict
def open_note(data, key_line):
    """The note's text, if the key signed it."""
    name, key_id, kind, key = note_key(key_line)
    try:
        text, _, lines = data.decode().rpartition("\n\n")
    except UnicodeDecodeError:
        raise Fault("a note is text")
    text += "\n"
    need(lines.endswith("\n"), "a note ends in a newline")
    good = 0
    for line in lines[:-1].split("\n"):
        dash, signer, encoded = (line.split(" ") + ["", ""])[:3]
        need(dash == "\u2014" and line.count(" ") == 2, "no signature line")
        signature = b64(encoded)
        if signer != name or signature[:4] != key_id:
            continue
        message, signature = text.encode(), signature[4:]
        if kind == 4:
            time, signature = struct.unpack(">Q", signature[:8])[0], signature[8:]
            message = f"cosignature/v1\ntime {time}\n".encode() + message
        need(cached_verify(key, message, signature), f"a wrong signature by {name}")
        good += 1
    need(good, f"{name} has not signed")
    return text


def checkpoint(data, key_line):
    lines = open_note(data, key_line).split("\n")
    need(len(lines) == 4 and lines[3] == "" and lines[0] == note_key(key_line)[0], "no checkpoint of this log")
    need(lines[1].isdigit() and str(int(lines[1])) == lines[1], "a bad size")
    return int(lines[1]), b64(lines[2], 32)


# --- the log --------------------------------------------------------------------------------------------------


def trust_roots(data):
    roots = parse(data)
    exactly(roots, ["schema", "log", "threshold", "signers"], ["allow_minority"])
    need(roots["schema"] == "ron.registry.roots/1", "another schema")
    body = {name: roots[name] for name in roots if name not in ("schema", "log")}
    return roots, body, signer_set(body)


def genesis(body):
    payload = {
        "schema": "ron.registry/1",
        "base_version": 0,
        "signers_version": 0,
        "nonce": "0" * 32,
        "ops": [{"op": "put", "kind": "signers", "id": "main", "body": body}],
        "note": "genesis",
        "expires_at": 0,
    }
    payload = canonical(payload).encode()
    record = {
        "version": 0,
        "prev": "b3:" + "0" * 64,
        "payload_b3": b3(payload),
        "payload_bytes": len(payload),
        "signers_version": 0,
        "approvals": [],
        "committed_at": 0,
    }
    return canonical(record).encode(), payload


class Log:
    """Follows a log from its roots, or from a snapshot."""

    def __init__(self, roots):
        self.roots, self.body, self.signers = trust_roots(roots)
        self.version, self.hash, self.signers_version = -1, "b3:" + "0" * 64, 0
        self.changed, self.leaves = {}, []

    @strict
    def begin(self, key, note, data):
        lines = open_note(note, key).split("\n")
        need(lines[0] == "ron.registry.snapshot/1" and lines[1] == self.roots["log"] and len(lines) == 6, "no snapshot")
        need(b3(data) == lines[4], "the state is not the snapshot's")
        state = parse_canonical(data)
        exactly(state, ["schema", "version", "hash", "signers_version", "items"])
        need((str(state["version"]), state["hash"]) == (lines[2], lines[3]), "a snapshot of another version")
        need(state["version"] + 1 == len(self.leaves), "a snapshot that does not follow the pruned leaves")
        changed = {(item["kind"], item["id"]): item["version"] for item in state["items"]}
        head = state["version"], state["hash"], state["signers_version"]
        if self.version >= 0:
            need((head, changed) == ((self.version, self.hash, self.signers_version), self.changed), "another state")
        self.version, self.hash, self.signers_version = head
        self.changed = changed
        (main,) = [item for item in state["items"] if item["kind"] == "signers"]
        self.signers = signer_set(main["body"])

    @strict
    def entry(self, record_data, payload_data):
        need(len(self.leaves) == self.version + 1, "pruned leaves without a snapshot")
        if self.version < 0:
            need((record_data, payload_data) == genesis(self.body), "another genesis")
        need(len(record_data) <= 60 << 10, "too large")
        record, payload = parse_canonical(record_data), read_payload(payload_data)
        names = ["version", "prev", "payload_b3", "payload_bytes", "signers_version", "approvals", "committed_at"]
        exactly(record, names)
        whole(record["version"], record["payload_bytes"], record["signers_version"], record["committed_at"])
        need(record["version"] == self.version + 1, "another version")
        need(record["prev"] == self.hash, "the chain is broken")
        need(record["payload_b3"] == b3(payload_data), "another payload")
        need(record["payload_bytes"] == len(payload_data), "another length")
        keys = [(op["kind"], op["id"]) for op in payload["ops"]]
        if record["version"] > 0:
            need(record["signers_version"] == payload["signers_version"] == self.signers_version, "another policy")
            need(record["committed_at"] <= payload["expires_at"], "expired")
            need(payload["base_version"] <= self.version, "based on what is to come")
            need(all(self.changed.get(key, 0) <= payload["base_version"] for key in keys), "a conflict")
            judge(record, payload, self.signers)
        self.version = record["version"]
        self.hash = b3(b"ron:svc-registry:entry:v1\n" + record_data)
        for op in payload["ops"]:
            self.changed[(op["kind"], op["id"])] = self.version
            if op["kind"] == "signers":
                self.signers, self.signers_version = signer_set(op["body"]), self.version
        self.leaves.append(leaf_hash(record_data))

    def checkpoint(self, key, note):
        size, root = checkpoint(note, key)
        need(size <= len(self.leaves) and tree_root(self.leaves[:size]) == root, "another root")
        return size


@strict
def check_export(data, roots_b3, log_key=None):
    head = b"ron.registry.export/1\n"
    need(data.startswith(head), "no export")
    at, frames = len(head), []
    while True:
        need(len(data) >= at + 5, "cut short")
        kind, length = chr(data[at]), struct.unpack(">I", data[at + 1 : at + 5])[0]
        content = data[at + 5 : at + 5 + length]
        need(len(content) == length, "cut short")
        if kind == "Z":
            need(content == blake3(data[: at + 5]) and at + 37 == len(data), "the last hash is wrong")
            break
        frames.append((kind, content))
        at += 5 + length
    need([kind for kind, _ in frames[:2]] == ["R", "K"], "it does not begin with roots and key")
    need(b3(frames[0][1]) == roots_b3, "other trust roots")
    log, key = Log(frames[0][1]), frames[1][1].decode()
    need(log_key in (None, key), "another log key")
    held, promised, early, signed = None, [], [], 0
    for kind, content in frames[2:]:
        if kind in "EN":
            held = content
        elif kind == "P" and promised and not log.leaves:
            early.append((held, content))
        elif kind == "P":
            log.entry(held, content)
        elif kind == "S":
            log.begin(key, held, content)
        elif kind == "C":
            signed = max(signed, log.checkpoint(key, content))
        elif kind == "M":
            promised.append(open_note(content, key).split("\n"))
        elif kind == "H":
            log.leaves += [content[i : i + 32] for i in range(0, len(content), 32)]
        else:
            raise Fault("a frame of no known kind")
    for lines in promised:
        need(lines[0] == "ron.registry.prune/1" and lines[1] == log.roots["log"], "no manifest")
        size, root = int(lines[3]), b64(lines[4], 32)
        need(size <= len(log.leaves) and tree_root(log.leaves[:size]) == root, "another root")
        signed = max(signed, size)
    for record, payload in early:
        version = parse_canonical(record)["version"]
        need(version < len(log.leaves) and log.leaves[version] == leaf_hash(record), "no record of the tree")
        need(parse_canonical(record)["payload_b3"] == b3(payload), "another payload")
    need(signed == len(log.leaves), "entries that the log did not sign")
    return log


@strict
def check_proof(data, roots_data, log_key, witness=None):
    roots, body, signers = trust_roots(roots_data)
    try:
        head, _, note = data.decode().partition("\n\n")
    except UnicodeDecodeError:
        raise Fault("a proof is text")
    lines = head.split("\n")
    need(lines[0] == "c2sp.org/tlog-proof@v1" and len(lines) >= 3, "no proof")
    need(lines[1].startswith("extra ") and lines[2].startswith("index "), "no proof of this kind")
    extra, tag = b64(lines[1][6:]), b"ron.registry.proof/1\n"
    need(extra.startswith(tag), "no proof of this kind")
    parts, at = [], len(tag)
    while at < len(extra):
        length = struct.unpack(">I", extra[at : at + 4].ljust(4, b"\xff"))[0]
        parts.append(extra[at + 4 : at + 4 + length])
        need(len(parts[-1]) == length, "cut short")
        at += 4 + length
    need(len(parts) >= 2 and (len(parts) - 2) % 3 == 0, "parts are missing")
    size, root = checkpoint(note.encode(), log_key)
    if witness:
        open_note(note.encode(), witness)
    changes = []
    for i in range(2, len(parts), 3):
        path = [parts[i + 2][j : j + 32] for j in range(0, len(parts[i + 2]), 32)]
        changes.append((parts[i], parts[i + 1], path))
    changes.append((parts[0], parts[1], [b64(line, 32) for line in lines[3:]]))
    version = 0
    for record_data, payload_data, path in changes:
        record, payload = parse_canonical(record_data), read_payload(payload_data)
        need(included(leaf_hash(record_data), record["version"], size, path) == root, "not in the tree")
        if record["version"] == 0:
            need((record_data, payload_data) == genesis(body), "another genesis")
            continue
        need((record["payload_b3"], record["payload_bytes"]) == (b3(payload_data), len(payload_data)), "another payload")
        need(record["signers_version"] == payload["signers_version"] == version, "another policy")
        need(version < record["version"] and record["committed_at"] <= payload["expires_at"], "out of its time")
        judge(record, payload, signers)
        for op in payload["ops"]:
            if op["kind"] == "signers":
                signers, version = signer_set(op["body"]), record["version"]
    need(lines[2] == f"index {record['version']}", "another index")


def check_tiles(tiles, leaves):
    """Tiles by `level/index`, against every leaf."""
    level = 0
    while leaves:
        for index in range(0, len(leaves), 256):
            stored = tiles.get(f"{level}/{index // 256}")
            need(stored == b"".join(leaves[index : index + 256]), f"tile {level}/{index // 256}")
        full = len(leaves) // 256
        leaves = [tree_root(leaves[i * 256 : (i + 1) * 256]) for i in range(full)]
        level += 1


# --- the frozen vectors ---------------------------------------------------------------------------------------


def check_parts(parts):
    """What a node stores, whole: entries, tiles, checkpoint."""
    log = Log(parts["roots"])
    for record, payload in zip(parts["records"], parts["payloads"]):
        log.entry(record, payload)
    check_tiles(parts["tiles"], log.leaves)
    log.checkpoint(parts["log_key"], parts["checkpoint"])
    need(checkpoint(parts["checkpoint"], parts["log_key"])[0] == len(log.leaves), "cut short")
    return log


def load(path):
    with open(path, "rb") as file:
        vectors = json.load(file)
    parts = {
        "roots": vectors["roots"].encode(),
        "log_key": vectors["log_key"],
        "records": [entry["record"].encode() for entry in vectors["entries"]],
        "payloads": [entry["payload"].encode() for entry in vectors["entries"]],
        "tiles": {name: bytes.fromhex(hashes) for name, hashes in vectors["tiles"].items()},
        "checkpoint": vectors["checkpoint"].encode(),
    }
    return vectors, parts


def check_vectors(path):
    vectors, parts = load(path)
    for case in vectors["json"]:
        need(canonical(parse(case["input"].encode())) == case["canonical"], case["input"])
    for case in vectors["json_refused"]:
        try:
            parse(case.encode("utf-8"))
        except Fault:
            continue
        raise Fault(f"accepted {case}")
    for case in vectors["b3"]:
        need(b3(bytes.fromhex(case["input"])) == case["b3"], "BLAKE3")
    need(b3(parts["roots"]) == vectors["roots_b3"], "the roots' hash")
    log = check_parts(parts)
    for entry, leaf in zip(vectors["entries"], log.leaves):
        need(b3(b"ron:svc-registry:entry:v1\n" + entry["record"].encode()) == entry["hash"], "an entry's hash")
        need(leaf.hex() == entry["leaf"], "a leaf's hash")
    for size, root in enumerate(vectors["tree_roots"], 1):
        need(tree_root(log.leaves[:size]).hex() == root, "a root")
    open_note(parts["checkpoint"], vectors["witness_key"])
    for proof in vectors["proofs"]:
        check_proof(proof.encode(), parts["roots"], vectors["log_key"], vectors["witness_key"])
    for export in vectors["exports"]:
        end = check_export(base64.b64decode(export), vectors["roots_b3"], vectors["log_key"])
        need((end.version, end.hash) == (log.version, log.hash), "another head")


def flipped(data, chance):
    at = chance.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]


def check_flips(path, seed, count):
    vectors, parts = load(path)
    chance = random.Random(seed)

    def found(check, what):
        try:
            check()
        except Fault:
            return
        raise SystemExit(f"not found: a changed bit in {what}, seed {seed}")

    for _ in range(count):
        for name in ("records", "payloads"):
            which = chance.randrange(len(parts[name]))
            changed = parts[name][:which] + [flipped(parts[name][which], chance)] + parts[name][which + 1 :]
            found(lambda: check_parts({**parts, name: changed}), f"{name} {which}")
        tile = chance.choice(sorted(parts["tiles"]))
        tiles = {**parts["tiles"], tile: flipped(parts["tiles"][tile], chance)}
        found(lambda: check_parts({**parts, "tiles": tiles}), f"tile {tile}")
        export = flipped(base64.b64decode(chance.choice(vectors["exports"])), chance)
        found(lambda: check_export(export, vectors["roots_b3"], vectors["log_key"]), "an export")
        proof = flipped(chance.choice(vectors["proofs"]).encode(), chance)
        keys = vectors["log_key"], vectors["witness_key"]
        found(lambda: check_proof(proof, parts["roots"], *keys), "a proof")


def main(command, path, *rest):
    if command == "vectors":
        check_vectors(path)
    elif command == "flip":
        check_flips(path, int(rest[0]), int(rest[1]))
    elif command == "export":
        with open(path, "rb") as file:
            check_export(file.read(), *rest)
    elif command == "proof":
        with open(path, "rb") as file, open(rest[0], "rb") as roots:
            check_proof(file.read(), roots.read(), *rest[1:])
    else:
        raise SystemExit(__doc__)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    try:
        main(*sys.argv[1:])
    except Fault as fault:
        raise SystemExit(f"fault: {fault}")
