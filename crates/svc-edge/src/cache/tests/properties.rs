//! Properties of the decisions, against a naive reference.

use super::*;
use proptest::prelude::*;

/// What a response says, as it could be written.
#[derive(Debug, Clone)]
struct Said {
    max_age: Option<u16>,
    s_maxage: Option<u16>,
    expires_in: Option<i16>,
    age: Option<u16>,
    delay: u8,
    swr: Option<u8>,
    sie: Option<u8>,
    no_cache: bool,
    must_revalidate: bool,
}

prop_compose! {
    fn said()(
        max_age in proptest::option::of(0u16..50),
        s_maxage in proptest::option::weighted(0.2, 0u16..50),
        expires_in in proptest::option::of(-20i16..50),
        age in proptest::option::of(0u16..30),
        delay in 0u8..5,
        swr in proptest::option::of(0u8..30),
        sie in proptest::option::of(0u8..30),
        no_cache in proptest::bool::weighted(0.1),
        must_revalidate in proptest::bool::weighted(0.1),
    ) -> Said {
        Said { max_age, s_maxage, expires_in, age, delay, swr, sie, no_cache, must_revalidate }
    }
}

impl Said {
    fn fields(&self) -> HeaderMap {
        let mut directives = vec!["x".to_owned()];
        let numbers = [
            ("max-age", self.max_age.map(u64::from)),
            ("s-maxage", self.s_maxage.map(u64::from)),
            ("stale-while-revalidate", self.swr.map(u64::from)),
            ("stale-if-error", self.sie.map(u64::from)),
        ];
        directives
            .extend(numbers.iter().filter_map(|(name, it)| it.map(|number| format!("{name}={number}"))));
        directives.extend(self.no_cache.then(|| "no-cache".to_owned()));
        directives.extend(self.must_revalidate.then(|| "must-revalidate".to_owned()));
        let mut text = format!("ETag: \"a\"\nDate: {DATE}\nCache-Control: {}", directives.join(", "));
        if let Some(after) = self.expires_in {
            text += &format!("\nExpires: {}", date::format(RECEIVED.secs() + i64::from(after)));
        }
        if let Some(age) = self.age {
            text += &format!("\nAge: {age}");
        }
        fields(&text)
    }

    fn head(&self) -> StoredHead {
        let requested = UnixMillis(RECEIVED.0 - u64::from(self.delay) * 1000);
        let exchange = Exchange { requested, received: RECEIVED };
        let request = HeaderMap::new();
        judge((&Method::GET, &request), (StatusCode::OK, &self.fields()), exchange, &Policy::default())
            .expect("a validator makes it worth storing")
            .complete(10)
            .unwrap()
    }

    /// In whole seconds and the words of the RFC: age, lifetime, and then `f`resh, `w`hile revalidating,
    /// stale but good for an `e`rror, or `n`ot usable.
    fn expected(&self, secs: i64) -> (i64, i64, char) {
        let age = i64::from(self.age.unwrap_or(0)) + i64::from(self.delay) + secs;
        let lifetime = match (self.s_maxage, self.max_age, self.expires_in) {
            (Some(shared), ..) => i64::from(shared),
            (None, Some(max), _) => i64::from(max),
            (None, None, Some(expires)) => i64::from(expires).max(0),
            (None, None, None) => 0,
        };
        let stale_until = |extra: Option<u8>| lifetime + i64::from(extra.unwrap_or(0));
        let may_be_stale = !self.must_revalidate && self.s_maxage.is_none() && !self.no_cache;
        let state = if lifetime > age && !self.no_cache {
            'f'
        } else if may_be_stale && stale_until(self.swr) > age {
            'w'
        } else if may_be_stale && stale_until(self.sie) > age {
            'e'
        } else {
            'n'
        };
        (age, lifetime, state)
    }
}

proptest! {
    #[test]
    fn a_verdict_is_that_of_a_naive_reading(said in said(), secs in 0u64..120) {
        let head = said.head();
        let (age, lifetime, state) = said.expected(i64::try_from(secs).unwrap());
        let freshness = head.freshness(&Policy::default(), after(secs));
        prop_assert_eq!(freshness.age_ms, u64::try_from(age * 1000).unwrap());
        prop_assert_eq!(freshness.lifetime_ms, u64::try_from(lifetime * 1000).unwrap());
        prop_assert_eq!(freshness.ttl_secs(), lifetime - age);
        let found = match verdict("", &[&head], secs) {
            Verdict::Reuse(reuse) => if reuse.revalidate { 'w' } else { 'f' },
            Verdict::Forward(forward) => if forward.on_error.is_some() { 'e' } else { 'n' },
            Verdict::NotCached => '5',
        };
        prop_assert_eq!(found, state);
    }

    /// Caution changes nothing about an age that is a number, or numbers without blanks, and lets nothing be reused with one that is not.
    #[test]
    fn caution_is_about_unclear_ages_alone(
        said in said(), secs in 0u64..120, age in "[0-9x,.; -]{0,6}", lines in 1usize..3,
        wish in prop::sample::select(vec!["", "Cache-Control: max-stale", "Cache-Control: max-age=9, max-stale=9"]),
    ) {
        let cautious = Policy { cautious_age: true, ..Policy::default() };
        let request = fields(wish);
        let decided = |head: &StoredHead, policy: &Policy| {
            decide((&Method::GET, &request), &[head], policy, after(secs))
        };
        let head = said.head();
        prop_assert_eq!(decided(&head, &cautious), decided(&head, &Policy::default()));
        let mut response = said.fields();
        response.remove("age");
        for _ in 0..lines {
            response.append("age", HeaderValue::from_str(&age).unwrap());
        }
        let exchange = (StatusCode::OK, &response);
        let pending = judge((&Method::GET, &HeaderMap::new()), exchange, AT_ONCE, &cautious);
        let head = pending.expect("a validator makes it worth storing").complete(10).unwrap();
        let plain = lines == 1 && age.trim().split(',').all(|it| it.parse::<u32>().is_ok());
        if plain {
            prop_assert_eq!(decided(&head, &cautious), decided(&head, &Policy::default()));
        } else {
            prop_assert!(matches!(decided(&head, &cautious), Verdict::Forward(_)));
        }
        prop_assert_eq!(StoredHead::decode(&head.encode()), Ok(head));
    }

    /// Whatever the clocks say, an age grows with time and never passes below what was stated.
    #[test]
    fn an_age_never_shrinks_below_what_was_stated(
        said in said(), requested in any::<u64>(), received in any::<u64>(), now in any::<u64>(), later in any::<u64>(),
    ) {
        let exchange = Exchange { requested: UnixMillis(requested), received: UnixMillis(received) };
        let pending = judge(
            (&Method::GET, &HeaderMap::new()), (StatusCode::OK, &said.fields()), exchange, &Policy::default(),
        );
        let head = pending.unwrap().complete(10).unwrap();
        let age = |now| head.freshness(&Policy::default(), UnixMillis(now)).age_ms;
        prop_assert!(age(now) >= u64::from(said.age.unwrap_or(0)) * 1000);
        prop_assert!(age(now) <= age(now.saturating_add(later)));
        let freshness = head.freshness(&Policy::default(), UnixMillis(now));
        let shown = answer((&Method::GET, &HeaderMap::new()), &head, freshness, UnixMillis(now));
        let shown: u64 = shown.unwrap().headers["age"].to_str().unwrap().parse().unwrap();
        prop_assert_eq!(shown, (age(now) / 1000).min(1 << 31));
    }

    /// Whatever a client asks, what is reused without being validated is fresh, or stale within what both
    /// sides allow.
    #[test]
    fn what_is_reused_is_fresh_or_allowed_to_be_stale(
        said in said(), secs in 0u64..120,
        wishes in proptest::collection::vec(prop::sample::select(vec![
            "no-cache", "max-age=20", "min-fresh=10", "max-stale", "max-stale=7", "only-if-cached",
        ]), 0..4),
    ) {
        let head = said.head();
        let asked = format!("Cache-Control: {}", wishes.join(", "));
        if let Verdict::Reuse(reuse) = verdict(&asked, &[&head], secs) {
            let (age, lifetime, _) = said.expected(i64::try_from(secs).unwrap());
            let allowed = wishes.iter().find_map(|wish| match *wish {
                "max-stale" => Some(i64::MAX / 2),
                "max-stale=7" => Some(7),
                _ => None,
            });
            prop_assert!(!said.no_cache && !wishes.contains(&"no-cache"));
            prop_assert!(!wishes.contains(&"max-age=20") || age <= 20);
            prop_assert!(!wishes.contains(&"min-fresh=10") || lifetime - age >= 10);
            if lifetime <= age {
                prop_assert!(!said.must_revalidate && said.s_maxage.is_none());
                let background = reuse.revalidate && lifetime + i64::from(said.swr.unwrap_or(0)) > age;
                prop_assert!(background || allowed.is_some_and(|allowed| age - lifetime <= allowed));
            }
        }
    }

    /// The reference compares the fields one by one.
    #[test]
    fn a_response_is_selected_only_for_the_fields_it_was_stored_for(
        kept in proptest::collection::vec((0u8..3, 0u8..3, 0usize..6), 1..5),
        asked in (0u8..3, 0u8..3),
    ) {
        const VARY: [(&str, &str); 6] = [
            ("", ""), ("Vary: a", "a"), ("Vary: B", "b"), ("Vary: a, b", "ab"),
            ("Vary: b\nVary: A", "ab"), ("Vary: c,A", "a"),
        ];
        let request = |a: u8, b: u8| {
            // Zero is a field that is absent.
            let line = |name: &str, value: u8| if value == 0 { String::new() } else { format!("{name}: {value}\n") };
            line("a", a) + &line("b", b)
        };
        let head = |(a, b, vary): &(u8, u8, usize)| {
            stored_for(&request(*a, *b), &format!("Cache-Control: max-age=60\n{}", VARY[*vary].0))
        };
        let heads: Vec<_> = kept.iter().map(head).collect();
        let all: Vec<_> = heads.iter().collect();
        let matches = |(a, b, vary): &(u8, u8, usize)| {
            let by = VARY[*vary].1;
            (!by.contains('a') || *a == asked.0) && (!by.contains('b') || *b == asked.1)
        };
        match select(&fields(&request(asked.0, asked.1)), &all) {
            Some(at) => prop_assert!(matches(&kept[at])),
            None => prop_assert!(!kept.iter().any(matches)),
        }
    }

    /// Whatever a 304 says, what the stored bytes depend on stays, and so does every field it does not name.
    #[test]
    fn an_update_keeps_the_framing_of_the_body(
        names in proptest::collection::vec(prop::sample::select(vec![
            "content-length", "content-encoding", "content-range", "transfer-encoding", "connection", "age", "date",
            "etag", "x-a", "x-b", "cache-control", "vary", "content-type",
        ]), 0..8),
        value in "[a-z0-9, =\"-]{0,12}",
    ) {
        let head = stored("Cache-Control: max-age=60\nETag: \"a\"\nContent-Encoding: gzip\nX-A: 1\nContent-Type: x/y");
        let response: HeaderMap = names
            .iter()
            .map(|name| (HeaderName::from_static(name), HeaderValue::from_str(&value).unwrap()))
            .collect();
        let found = freshen(&head, &HeaderMap::new(), &response, AT_ONCE).head;
        prop_assert_eq!(found.body(), head.body());
        prop_assert_eq!(found.status(), head.status());
        let listed: Vec<_> = value.split(',').map(|name| name.trim().to_owned()).collect();
        for name in ["content-encoding", "x-a", "content-type"] {
            let hidden = value.contains('"') || listed.iter().any(|it| it == name);
            let replaced = names.contains(&name) && name != "content-encoding";
            if !replaced && !hidden {
                prop_assert_eq!(found.headers().get(name), head.headers().get(name), "{}", name);
            }
        }
        for name in ["content-length", "content-range", "transfer-encoding", "connection", "age"] {
            prop_assert!(!found.headers().contains_key(name), "{}", name);
        }
        prop_assert_eq!(StoredHead::decode(&found.encode()), Ok(found));
    }

    #[test]
    fn no_bytes_decode_to_what_does_not_encode_back(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(head) = StoredHead::decode(&[&[1, 200, 1][..], &bytes].concat()) {
            prop_assert_eq!(StoredHead::decode(&head.encode()), Ok(head));
        }
    }
}
