//! Fairness, bounds and order, step by step and over random schedules.

mod naive;

use super::*;
use naive::Naive;
use proptest::prelude::*;
use std::cell::Cell;

thread_local! {
    /// Tenants and lanes looked at one by one on this thread.
    pub(super) static STEPS: Cell<usize> = const { Cell::new(0) };
}

fn shape(capacity: usize) -> Shape {
    Shape { capacity, quantum_bytes: 64 << 10, weights: [1, 5, 10] }
}

const ANON: u8 = 0;
const AUTHED: u8 = 1;

struct Bench {
    queue: FairQueue<u64>,
    now: Instant,
    next: u64,
}

impl Bench {
    fn new(capacity: usize) -> Bench {
        Bench { queue: FairQueue::new(shape(capacity), 2), now: Instant::now(), next: 0 }
    }

    fn push(&mut self, class: u8, id: u32, cost: u64) -> Pushed<u64> {
        self.push_with(Tenant { class, id }, 1, cost)
    }

    fn push_with(&mut self, tenant: Tenant, quantum: u64, cost: u64) -> Pushed<u64> {
        let job = self.next;
        self.next += 1;
        let deadline = self.now + Duration::from_secs(3600);
        self.queue.push(Entry { lane: 0, tenant, quantum, cost, deadline, job }, self.now)
    }

    /// Pops, runs and finishes one job.
    fn serve(&mut self) -> Option<Popped<u64>> {
        let popped = self.queue.pop(0, self.now)?;
        self.queue.finish(0, popped.tenant, popped.cost, popped.cost);
        Some(popped)
    }
}

/// Keeps every tenant's queue full while serving, and counts served cost by tenant.
fn saturate(tenants: &[(Tenant, u64, u64)], rounds: usize) -> HashMap<Tenant, u64> {
    let mut bench = Bench::new(10_000);
    let mut served: HashMap<Tenant, u64> = HashMap::new();
    for _ in 0..rounds {
        for (tenant, quantum, cost) in tenants {
            while bench.queue.held_and_share(*tenant, *quantum).0 < 50 {
                assert!(matches!(bench.push_with(*tenant, *quantum, *cost), Pushed::Queued(_)));
            }
        }
        let popped = bench.serve().unwrap();
        *served.entry(popped.tenant).or_default() += popped.cost;
    }
    served
}

#[test]
fn equal_tenants_get_equal_cost_whatever_their_jobs_weigh() {
    let tenants: Vec<_> = [4u64, 16, 64, 256]
        .iter()
        .enumerate()
        .map(|(id, kib)| (Tenant { class: AUTHED, id: id as u32 }, 1, kib << 10))
        .collect();
    let served = saturate(&tenants, 20_000);
    let costs: Vec<f64> = served.values().map(|cost| *cost as f64).collect();
    let jain =
        costs.iter().sum::<f64>().powi(2) / (costs.len() as f64 * costs.iter().map(|c| c * c).sum::<f64>());
    assert!(jain >= 0.999, "{jain} {costs:?}");
}

#[test]
fn quanta_and_weights_are_honoured_together() {
    let tenant = |class, id| Tenant { class, id };
    let tenants = [
        (tenant(AUTHED, 1), 1, 8 << 10),
        (tenant(AUTHED, 2), 2, 8 << 10),
        (tenant(AUTHED, 4), 4, 8 << 10),
        (tenant(ANON, 9), 1, 8 << 10),
    ];
    let served = saturate(&tenants, 60_000);
    let of = |class, id| served[&tenant(class, id)] as f64;
    let authed = of(AUTHED, 1) + of(AUTHED, 2) + of(AUTHED, 4);
    assert!((authed / of(ANON, 9) - 5.0).abs() < 0.1, "{served:?}");
    assert!((of(AUTHED, 2) / of(AUTHED, 1) - 2.0).abs() < 0.05, "{served:?}");
    assert!((of(AUTHED, 4) / of(AUTHED, 1) - 4.0).abs() < 0.1, "{served:?}");
}

#[test]
fn a_newcomer_is_served_before_the_round_goes_on_but_only_once() {
    let mut bench = Bench::new(1000);
    for _ in 0..100 {
        bench.push(AUTHED, 1, 4 << 10);
        bench.push(AUTHED, 2, 4 << 10);
    }
    for _ in 0..10 {
        bench.serve();
    }
    bench.push(AUTHED, 3, 4 << 10);
    assert_eq!(bench.serve().unwrap().tenant.id, 3, "served at once");
    let mut again = 0;
    for _ in 0..20 {
        bench.push(AUTHED, 3, 4 << 10);
        again += u32::from(bench.serve().unwrap().tenant.id == 3);
    }
    assert!(again <= 7, "being new again and again gives no more than its third: {again}");
}

#[test]
fn jobs_of_one_tenant_keep_their_order_and_idle_keeps_no_deficit() {
    let mut bench = Bench::new(100);
    for _ in 0..20 {
        bench.push(ANON, 1, 1000);
    }
    let order: Vec<u64> = std::iter::from_fn(|| bench.serve()).map(|popped| popped.job).collect();
    assert_eq!(order, (0..20).collect::<Vec<_>>());
    assert_eq!((bench.queue.lanes[0].known(), bench.queue.tokens()), ((0, 0), [0; 3]));
    assert!(bench.queue.held.is_empty() && bench.queue.quanta == [0; 3]);
}

#[test]
fn what_a_response_cost_is_settled_against_its_tenant() {
    let mut bench = Bench::new(1000);
    let mut served = [0u64; 2];
    for _ in 0..4000 {
        for id in 0..2 {
            while bench.queue.held_and_share(Tenant { class: AUTHED, id }, 1).0 < 10 {
                bench.push(AUTHED, id, 4 << 10);
            }
        }
        let popped = bench.queue.pop(0, bench.now).unwrap();
        // Tenant 0 gets answers sixteen times as large as tenant 1, though both looked alike when they came.
        let actual = if popped.tenant.id == 0 { 64 << 10 } else { 4 << 10 };
        bench.queue.finish(0, popped.tenant, popped.cost, actual);
        served[popped.tenant.id as usize] += actual;
    }
    let ratio = served[0] as f64 / served[1] as f64;
    assert!((ratio - 1.0).abs() < 0.05, "{served:?}");
}

#[test]
fn a_full_queue_refuses_whoever_has_its_share_and_lets_others_in() {
    let mut bench = Bench::new(10);
    for job in 0..10 {
        assert_eq!(bench.push(AUTHED, 1, 100), Pushed::Queued(job));
    }
    let full = |share| Full { share, wait: Duration::ZERO };
    assert_eq!(bench.push(AUTHED, 1, 100), Pushed::Busy(10, full(10)), "over its share");
    for (number, expected) in (10..).zip([9, 8, 7, 6, 5]) {
        assert_eq!(
            bench.push(AUTHED, 2, 100),
            Pushed::Displaced(number, expected, full(5)),
            "the newest of the one furthest over goes"
        );
    }
    assert!(matches!(bench.push(AUTHED, 2, 100), Pushed::Busy(..)), "both have half now");
    assert_eq!(bench.queue.len(), 10);
    assert!(matches!(bench.push(2, 7, 100), Pushed::Displaced(..)), "another class has its own share");
}

#[test]
fn a_debt_is_worked_off_while_idle_and_not_shaken_off() {
    let mut bench = Bench::new(100);
    let mut served = [0u64; 2];
    for _ in 0..20_000 {
        // Tenant 0 always has jobs; tenant 1 sends one large job at a time and is idle in between.
        while bench.queue.held_and_share(Tenant { class: AUTHED, id: 0 }, 1).0 < 2 {
            bench.push(AUTHED, 0, 4 << 10);
        }
        if bench.queue.held_and_share(Tenant { class: AUTHED, id: 1 }, 1).0 == 0 {
            bench.push(AUTHED, 1, 1 << 20);
        }
        let popped = bench.serve().unwrap();
        served[popped.tenant.id as usize] += popped.cost;
    }
    let ratio = served[1] as f64 / served[0] as f64;
    assert!((ratio - 1.0).abs() < 0.05, "{served:?}");
}

#[test]
fn lanes_do_not_hold_each_other_up() {
    let mut bench = Bench::new(100);
    let entry = |lane, id, job| {
        let deadline = Instant::now() + Duration::from_secs(60);
        Entry { lane, tenant: Tenant { class: ANON, id }, quantum: 1, cost: 1, deadline, job }
    };
    for job in 0..50 {
        bench.queue.push(entry(0, 1, job), bench.now);
    }
    bench.queue.push(entry(1, 2, 99), bench.now);
    assert_eq!(bench.queue.pop(1, bench.now).unwrap().job, 99);
    assert_eq!((bench.queue.pop(1, bench.now), bench.queue.lane_len(0)), (None, 50));
}

#[test]
fn what_cannot_be_done_in_time_is_refused_at_once_and_what_has_expired_not_charged() {
    let mut bench = Bench::new(1000);
    let start = bench.now;
    for _ in 0..400 {
        bench.push(AUTHED, 1, 1000);
    }
    // A hundred jobs a second.
    for _ in 0..100 {
        bench.now += Duration::from_millis(10);
        bench.serve();
    }
    let entry = |deadline, job| Entry {
        lane: 0,
        tenant: Tenant { class: AUTHED, id: 1 },
        quantum: 1,
        cost: 1000,
        deadline,
        job,
    };
    let hopeless = bench.queue.push(entry(bench.now + Duration::from_secs(1), 7), bench.now);
    let Pushed::Hopeless(7, wait) = hopeless else { panic!("{hopeless:?}") };
    assert!((2.0..4.5).contains(&wait.as_secs_f64()), "300 jobs at 100 a second: {wait:?}");
    let in_time = bench.queue.push(entry(bench.now + Duration::from_secs(10), 8), bench.now);
    assert!(matches!(in_time, Pushed::Queued(_)));
    // With others about, those 300 are more than its share: it is not the capacity that it waits for.
    for id in 2..10 {
        bench.push(AUTHED, id, 1000);
    }
    let own = bench.queue.push(entry(bench.now + Duration::from_secs(1), 9), bench.now);
    let Pushed::Busy(9, Full { share, wait }) = own else { panic!("{own:?}") };
    assert!(share < 300 && wait > Duration::from_secs(1), "{share} {wait:?}");
    bench.now = start + Duration::from_secs(7200);
    let late = bench.queue.pop(0, bench.now).unwrap();
    assert!(late.expired);
    assert_eq!(bench.queue.lanes[0].known().1, 0);
}

/// What an operation costs must not depend on how many tenants wait. Trees are not counted: they are searched.
#[test]
fn ten_thousand_tenants_cost_no_more_steps_than_one() {
    let steps = |tenants: u32| {
        let mut bench = Bench::new(2 * tenants as usize);
        // All but the first have little to spend and large jobs, so that the first is served again and again.
        let quantum = |id: u32| if id == 0 { 100 } else { 1 };
        let tenant = |id: u32| Tenant { class: AUTHED, id };
        for id in (0..tenants).chain(0..tenants) {
            bench.push_with(tenant(id), quantum(id), if id == 0 { 4 << 10 } else { 1 << 20 });
        }
        STEPS.set(0);
        let begun = Instant::now();
        for turn in 0..20_000u32 {
            let popped = bench.queue.pop(0, bench.now).unwrap();
            bench.queue.finish(0, popped.tenant, popped.cost, popped.cost / 2);
            let id = popped.tenant.id;
            assert!(matches!(bench.push_with(popped.tenant, quantum(id), popped.cost), Pushed::Queued(_)));
            // The queue is full: strangers take the places of those who have two, or are refused.
            let pushed = bench.push(ANON, turn % 64, 4 << 10);
            if let Pushed::Displaced(number, ..) = pushed {
                bench.queue.remove(0, Tenant { class: ANON, id: turn % 64 }, number).unwrap();
                let id = turn % tenants;
                bench.push_with(tenant(id), quantum(id), 1 << 20);
            }
        }
        let steps = STEPS.get() as f64 / 20_000.0;
        eprintln!("{tenants} tenants: {steps:.2} steps and {:?} a turn", begun.elapsed() / 20_000);
        steps
    };
    let (one, many) = (steps(1), steps(10_000));
    assert!(many <= one.max(8.0), "{one} steps a turn with one tenant, {many} with ten thousand");
}

#[test]
fn tenants_that_come_and_go_are_forgotten() {
    let mut bench = Bench::new(100);
    // Somebody waits all the time, so that the class is never idle.
    for _ in 0..2 {
        bench.push_with(Tenant { class: AUTHED, id: u32::MAX }, 1, 1 << 40);
    }
    bench.serve();
    for id in 0..100_000 {
        bench.push(AUTHED, id, 64 << 10);
        assert_eq!(bench.serve().unwrap().tenant.id, id);
    }
    assert!(bench.queue.lanes[0].known().0 <= 4200, "{:?}", bench.queue.lanes[0].known());
}

#[derive(Clone, Debug)]
enum Step {
    Push { lane: usize, class: u8, id: u32, quantum: u64, cost: u64 },
    Pop { lane: usize },
    Finish { nth: usize, actual: u64 },
    Remove { nth: usize },
    Reshape { quantum_bytes: u64, weights: [u64; CLASSES] },
}

fn a_step(tenants: u32) -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => (0usize..2, 0u8..3, 0..tenants, 0u64..40, 1u64..500).prop_map(|(lane, class, id, odd, cost)| {
            // A tenant's quantum follows from its name, but for a change now and then.
            let quantum = if odd == 0 { 4 } else { 1 + u64::from(id % 3) };
            Step::Push { lane, class, id, quantum, cost }
        }),
        20 => (0usize..2).prop_map(|lane| Step::Pop { lane }),
        15 => (0usize..99, 0u64..1500).prop_map(|(nth, actual)| Step::Finish { nth, actual }),
        4 => (0usize..99).prop_map(|nth| Step::Remove { nth }),
        1 => (50u64..200, [1u64..9, 1u64..9, 1u64..9])
            .prop_map(|(quantum_bytes, weights)| Step::Reshape { quantum_bytes, weights }),
    ]
}

proptest! {
    #[test]
    fn it_does_exactly_what_the_plain_rules_say(steps in proptest::collection::vec(a_step(6), 1..300)) {
        let shape = Shape { capacity: 20, quantum_bytes: 100, weights: [1, 5, 10] };
        let (mut queue, mut naive) = (FairQueue::new(shape.clone(), 2), Naive::new(shape, 2));
        let now = Instant::now();
        let deadline = now + Duration::from_secs(99);
        let (mut next, mut inside, mut running) = (0u64, Vec::<(usize, Tenant, u64, u64)>::new(), Vec::new());
        // The plain rules number refused jobs too; the queue does not.
        let plain = |pushed: Pushed<u64>| match pushed {
            Pushed::Queued(_) => Pushed::Queued(0),
            Pushed::Displaced(_, job, full) => Pushed::Displaced(0, job, full),
            other => other,
        };
        for step in steps {
            match step {
                Step::Push { lane, class, id, quantum, cost } => {
                    // Over all lanes a tenant has one quantum: the one last heard of.
                    let tenant = Tenant { class, id };
                    let quantum = naive.held().get(&tenant).map_or(quantum, |held| held.1);
                    let job = next;
                    next += 1;
                    let pushed = queue.push(Entry { lane, tenant, quantum, cost, deadline, job }, now);
                    if let Pushed::Queued(number) | Pushed::Displaced(number, ..) = &pushed {
                        inside.push((lane, tenant, *number, job));
                    }
                    if let Pushed::Displaced(_, other, _) = &pushed {
                        inside.retain(|(.., job)| job != other);
                    }
                    prop_assert_eq!(plain(pushed), plain(naive.push(lane, tenant, quantum, cost)));
                }
                Step::Pop { lane } => {
                    let popped = queue.pop(lane, now).map(|popped| (popped.tenant, popped.job, popped.cost));
                    prop_assert_eq!(popped, naive.pop(lane));
                    if let Some((tenant, gone, cost)) = popped {
                        inside.retain(|(.., job)| *job != gone);
                        running.push((lane, tenant, cost));
                    }
                }
                Step::Finish { nth, actual } => {
                    if !running.is_empty() {
                        let (lane, tenant, cost) = running.swap_remove(nth % running.len());
                        queue.finish(lane, tenant, cost, actual);
                        naive.finish(lane, tenant, cost, actual);
                    }
                }
                Step::Remove { nth } => {
                    if !inside.is_empty() {
                        let (lane, tenant, number, job) = inside.remove(nth % inside.len());
                        prop_assert_eq!(queue.remove(lane, tenant, number), Some(job));
                        prop_assert_eq!(queue.remove(lane, tenant, number), None);
                        prop_assert!(naive.remove(lane, tenant, job));
                    }
                }
                Step::Reshape { quantum_bytes, weights } => {
                    let shape = Shape { capacity: 20, quantum_bytes, weights };
                    naive.shape = shape.clone();
                    queue.reshape(shape, 2);
                }
            }
            prop_assert_eq!(queue.tokens(), naive.tokens());
            prop_assert!(queue.len() <= 20);
            prop_assert_eq!((queue.len(), queue.lane_len(0) + queue.lane_len(1)), (inside.len(), inside.len()));
            let held: BTreeSet<(Tenant, usize)> = queue.held.iter().map(|(tenant, held)| (*tenant, held.queued)).collect();
            prop_assert_eq!(held, naive.held().into_iter().map(|(tenant, (queued, _))| (tenant, queued)).collect());
        }
        for lane in 0..2 {
            while let Some(popped) = queue.pop(lane, now) {
                running.push((lane, popped.tenant, popped.cost));
            }
        }
        for (lane, tenant, cost) in running {
            queue.finish(lane, tenant, cost, cost);
        }
        prop_assert!(queue.lanes.iter().all(|lane| lane.known() == (0, 0)), "idle tenants leave no trace");
        prop_assert_eq!(queue.tokens(), [0; CLASSES]);
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn no_tenant_with_a_positive_weight_starves(costs in proptest::collection::vec(1u64..2_000_000, 6)) {
        let mut bench = Bench::new(10_000);
        let tenants: Vec<Tenant> = (0..6).map(|n| Tenant { class: n % 3, id: u32::from(n) }).collect();
        let mut last = [0usize; 6];
        for turn in 0..3000 {
            for (tenant, cost) in tenants.iter().zip(&costs) {
                while bench.queue.held_and_share(*tenant, 1).0 < 5 {
                    bench.push_with(*tenant, 1, *cost);
                }
            }
            let popped = bench.serve().unwrap();
            last[popped.tenant.id as usize] = turn;
        }
        // The lightest class has a sixteenth of the cost; jobs differ by up to 2,000,000 to 1.
        let served: Vec<bool> = last.iter().map(|turn| *turn > 0).collect();
        let light = costs.iter().max().unwrap() / costs.iter().min().unwrap();
        prop_assert!(light > 40 || served.iter().all(|served| *served), "{last:?} {costs:?}");
    }
}
