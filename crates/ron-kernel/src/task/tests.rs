//! Supervision under killed, failing and panicking tasks, in paused time.

use super::*;
use crate::bus::{KernelEvent, Next};
use crate::health::Scope;
use crate::kernel::{Drained, Ending, Kernel};

fn metric(kernel: &Kernel, line: &str) -> bool {
    kernel.metrics().scrape().contains(line)
}

#[tokio::test(start_paused = true)]
async fn a_panicking_task_restarts_and_the_service_recovers() {
    let kernel = Kernel::new();
    let service = kernel.service("t");
    service.ready();
    let runs = Arc::new(AtomicUsize::new(0));
    let seen = runs.clone();
    let shutdown = service.shutdown().clone();
    service.permanent("worker", 0, move || {
        let (run, shutdown) = (seen.fetch_add(1, Ordering::SeqCst), shutdown.clone());
        async move {
            assert!(run >= 2, "run {run} is a bad one");
            shutdown.draining().await;
            Ok(())
        }
    });
    tokio::time::sleep(Duration::from_millis(1)).await;
    let answer = kernel.health().readiness(None, Scope::Write).unwrap();
    assert_eq!((answer.ready, answer.missing), (false, vec!["t.worker".to_owned()]));
    assert!(kernel.health().readiness(None, Scope::Read).unwrap().ready);
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(runs.load(Ordering::SeqCst), 3);
    assert!(kernel.health().is_ok("t"));
    assert!(metric(&kernel, "tasks_panicked_total{service=\"t\",kind=\"worker\"} 2"));
    assert!(metric(&kernel, "service_restarts_total{service=\"t\"} 2"));
    let task = &service.tasks().to_json()[0];
    assert_eq!((&task["state"], &task["restarts"]), (&"running".into(), &2.into()));
    assert_eq!(task["last_exit"], "panic: run 1 is a bad one");
    kernel.drain(Duration::from_secs(3), &[]).await;
    assert!(metric(&kernel, "tasks_canceled_total{service=\"t\",kind=\"worker\"} 1"));
}

#[tokio::test(start_paused = true)]
async fn the_sixth_failure_in_a_minute_fails_the_service_closed() {
    let kernel = Kernel::new();
    let service = kernel.service("t");
    service.ready();
    let mut events = service.subscribe("test");
    let runs = Arc::new(AtomicUsize::new(0));
    let seen = runs.clone();
    service.permanent("worker", 3, move || {
        seen.fetch_add(1, Ordering::SeqCst);
        async { Err("no luck".into()) }
    });
    let Ending::Fatal(reason) = kernel.ending().await else { panic!("ended without a reason") };
    assert!(reason.contains("task worker #3 failed 6 times") && reason.contains("no luck"), "{reason}");
    assert_eq!(runs.load(Ordering::SeqCst), 6);
    let answer = kernel.health().readiness(None, Scope::Read).unwrap();
    assert_eq!((answer.ready, &answer.services["t"]), (false, &"failed"));
    assert_eq!(service.tasks().to_json()[0]["state"], "failed");
    loop {
        match events.next().await {
            Some(Next::Event(KernelEvent::ServiceCrashed { service, .. })) => break assert_eq!(service, "t"),
            Some(_) => {}
            None => panic!("the bus closed before the crash was told"),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn failures_spread_over_time_are_forgiven() {
    // With jitter left to chance, the moment of the last look could fall into a backoff.
    crate::random::reseed(1);
    let kernel = Kernel::new();
    let service = kernel.service("t");
    let runs = Arc::new(AtomicUsize::new(0));
    let seen = runs.clone();
    service.permanent("worker", 0, move || {
        seen.fetch_add(1, Ordering::SeqCst);
        async {
            tokio::time::sleep(Duration::from_secs(13)).await;
            Ok(())
        }
    });
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(runs.load(Ordering::SeqCst) > 30, "an early return restarts, for ever if it is rare enough");
    assert_eq!(service.tasks().to_json()[0]["state"], "running");
}

#[tokio::test]
async fn a_thousand_panicking_connections_do_not_fail_the_service() {
    let kernel = Kernel::new();
    let service = kernel.service("t");
    service.ready();
    for n in 0..1000 {
        service.scoped("conn", String::new, async move { panic!("connection {n}") });
    }
    service.tasks().finished().await;
    assert!(kernel.health().is_ok("t"));
    assert!(metric(&kernel, "tasks_panicked_total{service=\"t\",kind=\"conn\"} 1000"));
    assert!(metric(&kernel, "tasks_spawned_total{service=\"t\",kind=\"conn\"} 1000"));
}

#[tokio::test(start_paused = true)]
async fn stragglers_are_named_aborted_and_counted() {
    let kernel = Kernel::new();
    let service = kernel.service("t");
    service.scoped("conn", || "GET /stuck".to_owned(), std::future::pending());
    let shutdown = service.shutdown().clone();
    service.scoped("conn", || "GET /quick".to_owned(), async move { shutdown.draining().await });
    let begun = Instant::now();
    let Drained { stragglers } = kernel.drain(Duration::from_secs(3), &[]).await;
    assert_eq!(stragglers, ["t conn GET /stuck"]);
    assert!(begun.elapsed() >= Duration::from_secs(3) && begun.elapsed() < Duration::from_secs(4));
    assert!(metric(&kernel, "tasks_aborted_total{service=\"t\",kind=\"conn\"} 1"));
    assert_eq!(service.tasks().live(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_service_ahead_drains_while_the_others_still_serve_it_but_not_for_ever() {
    for (takes, told_after) in [(400, 400), (60_000, 1000)] {
        let kernel = Kernel::new();
        let (front, behind) = (kernel.service("front"), kernel.service("behind"));
        let shutdown = front.shutdown().clone();
        front.scoped("conn", || "GET /".to_owned(), async move {
            shutdown.draining().await;
            tokio::time::sleep(Duration::from_millis(takes)).await;
        });
        let (shutdown, begun) = (behind.shutdown().clone(), Instant::now());
        let told = Arc::new(AtomicUsize::new(0));
        let seen = told.clone();
        behind.scoped("conn", || "GET /".to_owned(), async move {
            shutdown.draining().await;
            seen.store(begun.elapsed().as_millis() as usize, Ordering::SeqCst);
        });
        tokio::task::yield_now().await;
        kernel.drain_ahead(Duration::from_secs(3), &["front"], &[]).await;
        let told = told.load(Ordering::SeqCst);
        assert!((told_after..told_after + 100).contains(&told), "told after {told} ms");
        assert!(begun.elapsed() < Duration::from_secs(4));
    }
}

#[tokio::test(start_paused = true)]
async fn the_kill_switch_panics_the_share_asked_for() {
    let kernel = Kernel::new();
    let service = kernel.service("t");
    for index in 0..4 {
        let shutdown = service.shutdown().clone();
        service.permanent("worker", index, move || {
            let shutdown = shutdown.clone();
            async move {
                shutdown.draining().await;
                Ok(())
            }
        });
    }
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(service.tasks().kill("worker", 0.5), 2);
    tokio::time::sleep(Duration::from_millis(1)).await;
    let backing_off = service.tasks().to_json().iter().filter(|task| task["state"] == "backoff").count();
    assert_eq!(backing_off, 2);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(service.tasks().to_json().iter().all(|task| task["state"] == "running"));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_during_backoff_is_not_lost() {
    let kernel = Kernel::new();
    let service = kernel.service("t");
    service.permanent("worker", 0, || async { Err("no luck".into()) });
    tokio::time::sleep(Duration::from_millis(1)).await;
    let begun = Instant::now();
    assert_eq!(kernel.drain(Duration::from_secs(3), &[]).await.stragglers, Vec::<String>::new());
    assert!(begun.elapsed() < Duration::from_millis(50));
}

#[test]
fn backoff_stays_between_its_bounds_is_jittered_and_replays_from_a_seed() {
    let replay = |seed| {
        crate::random::reseed(seed);
        (1..20).map(backoff).collect::<Vec<_>>()
    };
    assert_eq!(replay(7), replay(7));
    assert_ne!(replay(7), replay(8));
    let delays: Vec<_> = (0..500).map(|n| backoff(n % 8)).collect();
    assert!(delays.iter().all(|delay| (BACKOFF_MIN..=BACKOFF_MAX).contains(delay)));
    let distinct: std::collections::BTreeSet<_> = delays.iter().collect();
    assert!(distinct.len() > 100);
}
