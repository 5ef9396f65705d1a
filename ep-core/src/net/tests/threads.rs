//! Proxies in threads of their own: sleep and wake, opening and closing, many ports in one proxy.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::cluster::{bells, far, link_to, peers_of, shape};
use crate::net::sim::{SimNet, SimOptions};
use crate::net::{Closed, Kind, Port, PortSpec, ProxyHandle, ProxyOptions, Stream, Transport};

const DESC: Stream = Stream::new(0, Kind::Desc);

pub(super) fn start(net: &SimNet, num_nics: usize, options: ProxyOptions) -> ProxyHandle {
    let nics = (0..num_nics).map(|_| Box::new(net.nic()) as Box<dyn Transport>).collect();
    ProxyHandle::start(nics, options).unwrap()
}

fn open(handle: &ProxyHandle, rank: usize, num_ranks: usize) -> Port {
    let (_, bells) = bells(1);
    let spec = PortSpec { shape: shape(num_ranks - 1, 1), rank, peers: peers_of(rank, num_ranks), bells };
    handle.open(spec, far()).unwrap()
}

/// Ports of one group, connected and tested, `per_proxy` ranks to a proxy.
fn group(net: &SimNet, num_ranks: usize, per_proxy: usize, options: &ProxyOptions) -> Vec<Port> {
    let proxies: Vec<_> =
        (0..num_ranks.div_ceil(per_proxy)).map(|_| start(net, 2, options.clone())).collect();
    let ports: Vec<Port> =
        (0..num_ranks).map(|rank| open(&proxies[rank / per_proxy], rank, num_ranks)).collect();
    let offers: Vec<Vec<u8>> = ports.iter().map(|port| port.offer().to_vec()).collect();
    for (rank, port) in ports.iter().enumerate() {
        let offers = peers_of(rank, num_ranks).into_iter().map(|peer| offers[peer].clone()).collect();
        assert_eq!(port.connect(offers, far()).unwrap(), None);
    }
    let pending: Vec<_> = ports.iter().map(|port| port.begin_probe(far())).collect();
    pending.into_iter().for_each(|pending| pending.wait(far(), "probe").unwrap());
    ports
}

/// Sends descriptor `seq` on every link, and waits for those of the others.
fn exchange(port: &Port, seq: u64, pause: Duration) {
    let num_links = port.layout().shape().num_links;
    let deadline = Instant::now() + Duration::from_secs(10);
    let wait = |what: &str, done: &dyn Fn() -> bool| {
        while !done() {
            assert!(Instant::now() < deadline, "{what} {seq} did not come");
            std::thread::yield_now();
        }
    };
    for link in 0..num_links {
        wait("the slot of", &|| port.can_stage(link, DESC, seq));
        // SAFETY: the slot has 700 bytes and is free.
        unsafe { port.slot_staging(link, DESC, seq).cast::<u64>().write(seq * 7) };
        port.send(link, DESC, seq, 8).unwrap();
        std::thread::sleep(pause);
    }
    for link in 0..num_links {
        wait("message", &|| port.landed(link, DESC, seq).is_some());
        let slot = port.landed(link, DESC, seq).unwrap().cast::<u64>();
        // SAFETY: the message has landed and has 8 bytes.
        assert_eq!(unsafe { slot.read() }, seq * 7);
    }
}

fn play(ports: &[Port], calls: u64, pause: Duration) {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for port in ports {
            scope.spawn(move || {
                for seq in 0..calls {
                    exchange(port, seq, pause);
                    assert!(
                        start.elapsed() < Duration::from_secs(20),
                        "{seq} calls in {:?}",
                        start.elapsed()
                    );
                }
            });
        }
    });
}

#[test]
fn ranks_exchange_messages_through_threads() {
    let net = SimNet::threaded(SimOptions { seed: 3, ..SimOptions::default() });
    let ports = group(&net, 4, 1, &ProxyOptions::default());
    play(&ports, 200, Duration::ZERO);
    for port in ports {
        assert_eq!(port.close(far()), Ok(Closed::Drained));
    }
}

#[test]
fn one_proxy_serves_the_ports_of_several_ranks() {
    let net = SimNet::threaded(SimOptions { seed: 4, ..SimOptions::default() });
    let ports = group(&net, 8, 4, &ProxyOptions::default());
    play(&ports, 50, Duration::ZERO);
}

#[test]
fn a_proxy_that_always_sleeps_misses_no_message() {
    let start = Instant::now();
    sleepy(5);
    // A lost wake-up would cost a sleep of a second each.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn on_one_core_no_wake_up_is_lost_either() {
    let start = Instant::now();
    let thread = std::thread::spawn(|| {
        let allowed = sched_getaffinity(None).unwrap();
        let core = (0..CpuSet::MAX_CPU).find(|&core| allowed.is_set(core)).unwrap();
        let mut one = CpuSet::new();
        one.set(core);
        // The threads of the network and the proxies inherit it.
        sched_setaffinity(None, &one).unwrap();
        sleepy(6);
    });
    thread.join().unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

fn sleepy(seed: u64) {
    let net = SimNet::threaded(SimOptions { seed, ..SimOptions::default() });
    let options = ProxyOptions { spin: Duration::ZERO, ..ProxyOptions::default() };
    let ports = group(&net, 2, 1, &options);
    play(&ports, 500, Duration::from_micros(20));
    play_on_one_core(&ports, 500);
}

/// Both ranks in one thread: its proxies have slept whenever it sends.
fn play_on_one_core(ports: &[Port], calls: u64) {
    for seq in calls..2 * calls {
        for port in ports {
            while !port.can_stage(0, DESC, seq) {
                std::thread::yield_now();
            }
            port.send(0, DESC, seq, 8).unwrap();
        }
        for port in ports {
            while port.landed(0, DESC, seq).is_none() {
                std::thread::yield_now();
            }
        }
    }
}

#[test]
fn groups_come_and_go_while_others_send() {
    let net = SimNet::threaded(SimOptions { seed: 6, ..SimOptions::default() });
    let proxies: Vec<_> = (0..2).map(|_| start(&net, 1, ProxyOptions::default())).collect();
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        for group in 0..2usize {
            let (proxies, barrier) = (&proxies, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for generation in 0..20 {
                    let ports: Vec<Port> = (0..2).map(|rank| open(&proxies[rank], rank, 2)).collect();
                    for rank in 0..2 {
                        let offer = ports[1 - rank].offer().to_vec();
                        ports[rank].connect(vec![offer], far()).unwrap();
                    }
                    let pending: Vec<_> = ports.iter().map(|port| port.begin_probe(far())).collect();
                    pending.into_iter().for_each(|pending| pending.wait(far(), "probe").unwrap());
                    play(&ports, 20, Duration::ZERO);
                    if (group + generation) % 2 == 0 {
                        ports.into_iter().for_each(|port| assert_eq!(port.close(far()), Ok(Closed::Drained)));
                    }
                }
            });
        }
    });
    assert_eq!(link_to(0, 1), 0);
}

#[test]
fn a_proxy_that_has_ended_answers_with_an_error() {
    let net = SimNet::threaded(SimOptions::default());
    let handle = start(&net, 1, ProxyOptions::default());
    let port = open(&handle, 0, 2);
    drop(handle);
    // The port keeps the thread.
    let offers = vec![port.offer().to_vec()];
    assert!(port.connect(offers, far()).unwrap_err().message.contains("rank 1"), "it still answers");
}

#[test]
fn the_reason_for_pinning_is_a_sentence() {
    let net = SimNet::threaded(SimOptions::default());
    let crowded = ProxyOptions { busy_threads: 4096, ..ProxyOptions::default() };
    assert!(start(&net, 1, crowded).pinning().contains("cores for 4096 ranks and proxies"));
    let alone = ProxyOptions { busy_threads: 0, ..ProxyOptions::default() };
    assert!(start(&net, 1, alone).pinning().starts_with("pinned to core"));
}
