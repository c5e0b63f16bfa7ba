//! Keys of an object store: from the environment, or from a file that only its owner can read.

use ron_kernel::key::{KeyError, check_private};
use std::fmt;
use std::path::Path;

/// The largest file that is read; one has a few lines.
const FILE_MAX: u64 = 64 << 10;
const ID: &str = "AWS_ACCESS_KEY_ID";
const SECRET: &str = "AWS_SECRET_ACCESS_KEY";
const TOKEN: &str = "AWS_SESSION_TOKEN";

/// Who asks. Neither secret is ever shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub access_key_id: String,
    pub secret_key: String,
    /// That of keys which hold for a while.
    pub session_token: Option<String>,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Credentials").field("access_key_id", &self.access_key_id).finish_non_exhaustive()
    }
}

/// Why there are none.
#[derive(Debug, thiserror::Error)]
pub enum NoCredentials {
    #[error(transparent)]
    File(#[from] KeyError),
    #[error("{0} is no file of keys: {1}")]
    Format(String, &'static str),
    #[error("there are no keys: set {ID} and {SECRET}, or name a file of keys in edge.s3.credentials_file")]
    Environment,
}

impl Credentials {
    /// Those of a file, or, if none is named, of the environment. Blocks.
    pub fn load(file: &str, base: &Path) -> Result<Credentials, NoCredentials> {
        if file.is_empty() {
            return Credentials::find(|name| std::env::var(name).ok());
        }
        let path = base.join(file);
        check_private(&path)?;
        let name = path.display().to_string();
        let length = std::fs::metadata(&path).map_or(0, |meta| meta.len());
        if length > FILE_MAX {
            return Err(NoCredentials::Format(name, "it is larger than 64 KiB"));
        }
        let text =
            std::fs::read_to_string(&path).map_err(|error| KeyError::Read { path: name.clone(), error })?;
        Credentials::parse(&text).map_err(|why| NoCredentials::Format(name, why))
    }

    fn find(variable: impl Fn(&str) -> Option<String>) -> Result<Credentials, NoCredentials> {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        match (set(ID), set(SECRET)) {
            (Some(access_key_id), Some(secret_key)) => {
                Ok(Credentials { access_key_id, secret_key, session_token: set(TOKEN) })
            }
            _ => Err(NoCredentials::Environment),
        }
    }

    /// Reads the form that Amazon's own tools write: `name = value`, of the profile `[default]`.
    fn parse(text: &str) -> Result<Credentials, &'static str> {
        let [mut id, mut secret, mut token] = [const { None }; 3];
        let mut ours = true;
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with(['#', ';']) {
                continue;
            }
            if let Some(profile) = line.strip_prefix('[') {
                ours = profile.trim_end_matches(']').trim() == "default";
                continue;
            }
            let (name, value) = line.split_once('=').ok_or("a line is neither [PROFILE] nor NAME = VALUE")?;
            let slot = match name.trim().to_ascii_lowercase().as_str() {
                "aws_access_key_id" => &mut id,
                "aws_secret_access_key" => &mut secret,
                "aws_session_token" => &mut token,
                _ => continue,
            };
            if ours {
                *slot = Some(value.trim().to_owned()).filter(|value| !value.is_empty());
            }
        }
        match (id, secret) {
            (Some(access_key_id), Some(secret_key)) => {
                Ok(Credentials { access_key_id, secret_key, session_token: token })
            }
            _ => Err("it needs lines aws_access_key_id = … and aws_secret_access_key = … under [default]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn keys_come_from_the_form_that_others_write_and_from_the_environment() {
        let parse = |text: &str| {
            Credentials::parse(text).map(|it| (it.access_key_id, it.secret_key, it.session_token))
        };
        let plain = Ok(("A".to_owned(), "b/c=".to_owned(), None));
        assert_eq!(parse("aws_access_key_id=A\naws_secret_access_key=b/c=\n"), plain);
        let profiles = "# mine\n[other]\naws_access_key_id = X\naws_secret_access_key = Y\n\n[default]\n\
                        AWS_ACCESS_KEY_ID = A\naws_secret_access_key = b/c=\nregion = eu\n[third]\naws_session_token = no\n";
        assert_eq!(parse(profiles), plain);
        for wrong in
            ["", "secret", "aws_access_key_id = A", "[other]\naws_access_key_id=A\naws_secret_access_key=b"]
        {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        let known = |name: &str| (name != TOKEN).then(|| name.to_ascii_lowercase());
        assert_eq!(Credentials::find(known).unwrap().access_key_id, "aws_access_key_id");
        let half = |name: &str| (name == ID).then(|| "A".to_owned());
        assert!(Credentials::find(half).unwrap_err().to_string().contains(SECRET));
        let all = |name: &str| Some(name.to_owned());
        assert_eq!(Credentials::find(all).unwrap().session_token.as_deref(), Some(TOKEN));
    }

    #[test]
    fn a_file_that_others_can_read_is_refused_and_errors_show_no_secret() {
        let dir = tempfile::tempdir().unwrap();
        let write = |text: &str, mode: u32| {
            let path = dir.path().join("keys");
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            Credentials::load("keys", dir.path())
        };
        let good = "aws_access_key_id = A\naws_secret_access_key = hidden\n";
        assert_eq!(write(good, 0o600).unwrap().secret_key, "hidden");
        assert!(!format!("{:?}", write(good, 0o600).unwrap()).contains("hidden"));
        assert!(write(good, 0o640).unwrap_err().to_string().contains("keys"));
        let odd = write("aws_access_key_id = A\nhidden\n", 0o600).unwrap_err().to_string();
        assert!(odd.contains("NAME = VALUE") && !odd.contains("hidden"), "{odd}");
        let long = write(&"#".repeat(70_000), 0o600).unwrap_err().to_string();
        assert!(long.contains("64 KiB"), "{long}");
        assert!(Credentials::load("nowhere", dir.path()).is_err());
    }
}
