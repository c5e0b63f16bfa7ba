//! A newcomer's first files: keys, a token, a pack of map tiles, a commented configuration.

use anyhow::Context as _;
use ron_kernel::key::{PrivateKey, write_private};
use ron_kernel::tls::write_dev_ca;
use std::fmt::Write as _;
use std::io::Cursor;
use std::path::Path;
use svc_edge::pack::sample::Sample;
use svc_overlay::PeerAddress;

const TEMPLATE: &str = include_str!("init/ron.toml");
const TLS: &str = r#"
# A development certificate; try: curl --cacert tls/ca.pem https://localhost:8443/
[gateway.tls]
listen = "127.0.0.1:8443"
cert = "tls/server.pem"
key = "tls/server.key"
"#;

/// Makes the files of a node in `dir`, which is to join these others; nothing that exists is changed.
pub fn init(dir: &Path, tls: bool, join: &[PeerAddress]) -> anyhow::Result<()> {
    let config = dir.join("ron.toml");
    anyhow::ensure!(
        !config.exists(),
        "{} exists already: start it with `ron up --data {}`, or choose another folder",
        config.display(),
        dir.display()
    );
    std::fs::create_dir_all(dir).with_context(|| format!("cannot make the folder {}", dir.display()))?;
    let key = dir.join("node.key");
    if !key.exists() {
        PrivateKey::generate()?.write_new(&key)?;
    }
    let token = dir.join("admin.token");
    if !token.exists() {
        write_private(&token, new_token()?.as_bytes())?;
    }
    let pack = dir.join("sample.pmtiles");
    if !pack.exists() {
        let mut bytes = Vec::new();
        let spill = Cursor::<Vec<u8>>::default;
        Sample::default().write(spill(), spill(), &mut bytes)?;
        std::fs::write(&pack, bytes).with_context(|| format!("cannot write {}", pack.display()))?;
    }
    let peers: Vec<String> = join.iter().map(|peer| format!("\"{peer}\"")).collect();
    let mut text = TEMPLATE.replace("peers = []", &format!("peers = [{}]", peers.join(", ")));
    if tls {
        write_dev_ca(&dir.join("tls"))?;
        // The table of the TLS listener goes before the lists that follow the gateway's own keys.
        let at = text.find("[[gateway.upstreams]]").unwrap_or(text.len());
        text.insert_str(at, &format!("{}\n", TLS.trim_start()));
    }
    std::fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
    Ok(())
}

/// 32 random bytes in hexadecimal.
pub fn new_token() -> anyhow::Result<String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("no randomness: {error}"))?;
    Ok(bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    }))
}
