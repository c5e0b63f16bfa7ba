//! A pack's metadata: a JSON object, kept as its members' text.

use super::Fault;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;
use std::collections::BTreeMap;

/// The largest metadata, compressed or not.
pub const METADATA_BYTES_MAX: u64 = 4 << 20;
/// Members of the object. Their values stay text, so memory follows the number of bytes and not their shape.
pub(super) const MEMBERS_MAX: usize = 1000;

/// What a pack says of itself. Of members with the same name the last one counts, as in other readers of JSON.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    members: BTreeMap<String, Box<RawValue>>,
}

impl Metadata {
    pub fn parse(json: &[u8]) -> Result<Self, Fault> {
        if json.len() as u64 > METADATA_BYTES_MAX {
            return Err(Fault::MetadataCap);
        }
        serde_json::from_slice(json).map_err(|_not_an_object| Fault::Metadata)
    }

    pub fn member(&self, name: &str) -> Option<&RawValue> {
        self.members.get(name).map(|value| &**value)
    }

    pub fn members(&self) -> impl Iterator<Item = (&str, &RawValue)> {
        self.members.iter().map(|(name, value)| (name.as_str(), &**value))
    }

    pub fn set(&mut self, name: &str, value: Box<RawValue>) {
        self.members.insert(name.to_owned(), value);
    }

    /// A member that is a string, and not an empty one.
    pub fn text(&self, name: &str) -> Option<String> {
        let text: String = serde_json::from_str(self.member(name)?.get()).ok()?;
        (!text.is_empty()).then_some(text)
    }

    /// The description of the vector layers, if it is one: a list of objects with an `id` and `fields`.
    pub fn vector_layers(&self) -> Option<&RawValue> {
        #[expect(dead_code, reason = "only the shape is looked at")]
        #[derive(Deserialize)]
        struct Layer {
            id: String,
            fields: Fields,
        }
        let layers = self.member("vector_layers")?;
        serde_json::from_str::<Vec<Layer>>(layers.get()).ok()?;
        Some(layers)
    }

    pub fn to_json(&self) -> String {
        serde_json::to_string(&self.members).expect("names and texts of JSON are JSON")
    }
}

/// An object of which nothing is kept.
struct Fields;

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Fields;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
                while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
                Ok(Fields)
            }
        }
        from.deserialize_map(Reader)
    }
}

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Reader;
        impl<'de> Visitor<'de> for Reader {
            type Value = Metadata;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut metadata = Metadata::default();
                while let Some((name, value)) = map.next_entry()? {
                    metadata.members.insert(name, value);
                    if metadata.members.len() > MEMBERS_MAX {
                        return Err(A::Error::custom("too many members"));
                    }
                }
                Ok(metadata)
            }
        }
        from.deserialize_map(Reader)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_are_kept_as_they_were_written() {
        let json = br#"{"name":"World","empty":"","n":1e400,"vector_layers":[ {"id":"a","fields":{"x":"Number"},"z":[]} ]}"#;
        let metadata = Metadata::parse(json).unwrap();
        assert_eq!(metadata.text("name").as_deref(), Some("World"));
        assert_eq!((metadata.text("empty"), metadata.text("n"), metadata.text("none")), (None, None, None));
        let layers = metadata.vector_layers().unwrap().get();
        assert_eq!(layers, r#"[ {"id":"a","fields":{"x":"Number"},"z":[]} ]"#);
        assert_eq!(Metadata::parse(metadata.to_json().as_bytes()).unwrap().to_json(), metadata.to_json());
        assert!(metadata.to_json().contains(r#""n":1e400"#));
    }

    #[test]
    fn layers_of_another_shape_are_none() {
        for layers in
            ["{}", "[1]", r#"[{"id":"a"}]"#, r#"[{"id":1,"fields":{}}]"#, r#"[{"id":"a","fields":[]}]"#]
        {
            let metadata = Metadata::parse(format!(r#"{{"vector_layers":{layers}}}"#).as_bytes()).unwrap();
            assert!(metadata.vector_layers().is_none(), "{layers}");
        }
    }

    #[test]
    fn what_is_no_object_or_too_large_is_refused() {
        let check =
            |json: &[u8], fault| assert_eq!(Metadata::parse(json).map(|found| found.to_json()), Err(fault));
        check(b"", Fault::Metadata);
        check(b"[]", Fault::Metadata);
        check(b"{} x", Fault::Metadata);
        check(b"{\"a\":\"\xff\"}", Fault::Metadata);
        check(&vec![b' '; METADATA_BYTES_MAX as usize + 1], Fault::MetadataCap);
        let many: Vec<String> = (0..=MEMBERS_MAX).map(|n| format!("\"{n}\":0")).collect();
        check(format!("{{{}}}", many.join(",")).as_bytes(), Fault::Metadata);
        let deep = format!("{{\"a\":{}{}}}", "[".repeat(1 << 20), "]".repeat(1 << 20));
        assert!(Metadata::parse(deep.as_bytes()).is_ok(), "depth costs no stack");
    }
}
