//! What a test outside cannot hold still: caps on costly reads, and whose pages may write.

use super::*;
use crate::checkpointor::make;
use crate::fixture::Fixture;
use ron_kernel::channel;
use ron_kernel::http::Peer;
use ron_kernel::inventory::{ChannelKind, ChannelSpec, Policy};
use ron_kernel::sync::Limits;

static QUEUE: ChannelSpec = ChannelSpec {
    service: "registry",
    name: "test",
    kind: ChannelKind::Mpsc,
    capacity: 1,
    policy: Policy::RejectNew,
    producers: &[],
    consumers: &[],
};

fn api(registry: &Fixture) -> Api {
    let queue = || {
        let inventory = registry.shared.service.inventory();
        channel::queue::<Job>(inventory, &QUEUE, Limits::items(1), Policy::RejectNew).0
    };
    Api::new(&registry.shared, queue(), queue(), Ahead::new(&registry.shared).unwrap(), Verifier::new(&[]))
}

async fn get(api: &Api, path: &str) -> Response<Body> {
    let request = Request::get(path).header("host", "test").body(Body::default()).unwrap();
    api.call(request, &ConnInfo::new(Peer::Unix { uid: 0 }, false)).await
}

#[tokio::test]
async fn costly_reads_are_few_at_a_time_and_the_rest_is_told_to_come_again() {
    let mut registry = Fixture::new(RegistrySettings::default());
    registry.grow(3);
    registry.shared.publish_checkpoint(make(&registry.shared, None).unwrap().0);
    let api = api(&registry);
    let busy = |response: &Response<Body>| {
        let headers = response.headers();
        response.status() == 429 && headers["x-reason"] == "busy" && headers["retry-after"] == "1"
    };
    let mut exports = Vec::new();
    for _ in 0..EXPORTS_MAX {
        exports.push(get(&api, "/registry/export").await);
    }
    assert!(exports.iter().all(|response| response.status() == 200));
    assert!(busy(&get(&api, "/registry/export").await), "each holds its place until its last byte");
    exports.pop();
    assert_eq!(get(&api, "/registry/export").await.status(), 200);
    let replays: Vec<_> = (0..REPLAYS_MAX).map(|_| api.replays.try_take().unwrap()).collect();
    assert!(busy(&get(&api, "/registry/items?at=1").await));
    assert_eq!(get(&api, "/registry/items").await.status(), 200, "the present costs nothing");
    drop(replays);
    assert_eq!(get(&api, "/registry/items?at=1").await.status(), 200);
    assert_eq!(api.busy.with(["registry", "read", ""]).value(), 2);
}

#[tokio::test]
async fn what_is_not_as_it_was_written_is_not_served_and_the_damage_is_named() {
    for spoil in [crate::store::Store::spoil, crate::store::Store::spoil_payload, crate::store::Store::lose] {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(600);
        let api = api(&registry);
        let read = async |path: &str| {
            let response = get(&api, path).await;
            let (status, headers) = (response.status().as_u16(), response.headers().clone());
            let body =
                String::from_utf8(response.into_body().collect(1 << 20).await.unwrap().to_vec()).unwrap();
            (status, headers, body)
        };
        for path in
            ["/registry/300", "/registry/log?from=256&limit=100", "/tile/entries/001", "/registry/head"]
        {
            let (status, headers, body) = read(path).await;
            assert!(status == 200 && !body.contains("damaged"), "{path}: {status} {headers:?}");
        }
        spoil(&registry.shared.store, 300);
        let (status, headers, body) = read("/registry/log?from=256&limit=100").await;
        assert_eq!(
            (status, &headers["x-reason"], &headers["cache-control"]),
            (503, &"storage".parse().unwrap(), &"no-store".parse().unwrap())
        );
        assert!(body.contains("version 300 is damaged"), "{body}");
        assert_eq!(read("/registry/300").await.0, 503);
        assert_eq!(read("/registry/299").await.0, 200);
        assert_eq!(registry.shared.damage().unwrap().as_str(), "version 300 is damaged");
        let (_, _, head) = read("/registry/head").await;
        let head: serde_json::Value = serde_json::from_str(&head).unwrap();
        assert_eq!((&head["damaged"], &head["version"]), (&"version 300 is damaged".into(), &600.into()));
        let (status, _, body) = read("/registry/601").await;
        assert!(status == 503 && body.contains("version 300 is damaged"), "{body}");
    }
}

#[tokio::test]
async fn that_the_last_entry_is_missing_is_damage_too() {
    for path in ["/tile/entries/001.p/45", "/registry/300", "/registry/log?from=298"] {
        let mut registry = Fixture::new(RegistrySettings::default());
        registry.grow(300);
        let api = api(&registry);
        assert_eq!(get(&api, path).await.status(), 200);
        registry.shared.store.lose(300);
        assert_eq!(get(&api, path).await.status(), 503, "{path}");
        assert_eq!(registry.shared.damage().unwrap().as_str(), "version 300 is damaged", "{path}");
    }
}

#[tokio::test]
async fn a_snapshot_that_is_not_the_signed_one_is_not_served() {
    let mut registry = Fixture::new(RegistrySettings::default());
    registry.grow(3);
    registry.shared.publish_checkpoint(make(&registry.shared, None).unwrap().0);
    let api = api(&registry);
    assert_eq!(get(&api, "/registry/snapshot").await.status(), 200);
    let reader = registry.shared.store.reader().unwrap();
    let (version, note, _) = reader.snapshot(u64::MAX).unwrap().unwrap();
    let of_none = || crate::verifier::is_signed(&registry.shared, version, &note, None);
    assert!(of_none().is_err_and(|error| error.is_damage()), "its state is gone and it is not");
    registry.grow(2);
    make(&registry.shared, None).unwrap();
    registry.grow(1);
    make(&registry.shared, None).unwrap();
    let of_none = || crate::verifier::is_signed(&registry.shared, version, &note, None);
    assert!(of_none().is_ok_and(|there| !there), "both were let go of");
    registry.shared.store.spoil_snapshot(6);
    assert_eq!(get(&api, "/registry/snapshot").await.status(), 503);
    assert_eq!(registry.shared.damage().unwrap().as_str(), "version 6 is damaged");
}

#[tokio::test]
async fn what_is_past_its_end_is_shown_as_expired_though_nobody_has_noted_it_yet() {
    let limits = crate::config::LimitSettings {
        proposal_ttl: ron_kernel::units::Span::millis(1),
        ..Default::default()
    };
    let mut registry = Fixture::new(RegistrySettings { limits, ..RegistrySettings::default() });
    let proposal = crate::fixture::put(0, "a", 1);
    let approvals = crate::checks::Given::new(&proposal, Vec::new());
    let id = proposal.b3();
    assert!(registry.ask(crate::job::Ask::Propose { proposal, approvals, commit: false }).is_ok());
    let ended = crate::shared::now_millis() + 2;
    while crate::shared::now_millis() < ended {}
    let api = api(&registry);
    let read = async |path: String| {
        let body = get(&api, &path).await.into_body().collect(1 << 20).await.unwrap();
        serde_json::from_slice::<serde_json::Value>(&body).unwrap()
    };
    assert_eq!(read(format!("/registry/proposals/{id}")).await["state"], "expired");
    assert_eq!(read("/registry/proposals".to_owned()).await["proposals"], serde_json::json!([]));
}

#[test]
fn an_origin_is_the_hosts_own_whatever_way_the_port_is_written() {
    for (origin, host, secure, same) in [
        ("http://a.example", "a.example", false, true),
        ("http://a.example:80", "A.example", false, true),
        ("https://a.example", "a.example:443", false, true),
        ("https://a.example", "a.example", true, true),
        ("http://a.example:8082", "a.example:8082", false, true),
        ("http://[::1]:8082", "[::1]:8082", false, true),
        ("http://a.example", "a.example", true, false),
        ("http://a.example", "a.example:8082", false, false),
        ("https://a.example", "a.example:80", false, false),
        ("http://a.example.evil", "a.example", false, false),
        ("null", "null", false, false),
        ("https://", "", false, false),
    ] {
        assert_eq!(is_site(origin, host, secure), same, "{origin} {host} {secure}");
    }
}
