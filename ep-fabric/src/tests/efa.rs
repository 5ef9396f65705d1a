//! What this crate does on a device that behaves as EFA.

use std::ffi::c_int;
use std::os::fd::AsFd;

use ep_core::{Result, Status};

use super::fake::{self, Behaviour};
use crate::sys::newer::{self, FI_MR_DMABUF};
use crate::sys::{FI_ECONNRESET, FI_EINVAL, FI_OPT_EFA_RNR_RETRY, FI_OPT_FI_HMEM_P2P};
use crate::transport::{
    Completion, DmaBuf, FaultClass, PeerId, Posted, Region, RegionId, Registered, RemoteRegion, Transport,
    Write,
};
use crate::{Nic, Selection, Settings};

fn open_with(behaviour: Behaviour, settings: &Settings, device_memory: bool) -> Result<Nic> {
    let library = fake::library(behaviour);
    let selection = Selection::make(&library, settings, device_memory)?;
    Nic::open(&selection, 0, settings)
}

fn open(behaviour: Behaviour) -> Result<Nic> {
    open_with(behaviour, &Settings::default(), false)
}

/// Two NICs that know each other, with a registered cell of 4 KiB each.
struct Pair {
    nics: [Nic; 2],
    peers: [PeerId; 2],
    regions: [Registered; 2],
    memory: [Box<[u8]>; 2],
}

impl Pair {
    fn open(behaviour: Behaviour, settings: &Settings) -> Pair {
        let library = fake::library(behaviour);
        let selection = Selection::make(&library, settings, false).unwrap();
        let mut nics = [0, 1].map(|at| Nic::open(&selection, at, settings).unwrap());
        let addresses = [nics[0].address(), nics[1].address()];
        let peers = [nics[0].connect(&addresses[1]).unwrap(), nics[1].connect(&addresses[0]).unwrap()];
        let mut memory = [1, 2].map(|fill| vec![fill; 4096].into_boxed_slice());
        let regions = [0, 1].map(|at| {
            // SAFETY: the memory goes after the NICs, which are dropped first.
            let region = unsafe { Region::new(memory[at].as_mut_ptr(), 4096, None) };
            nics[at].register(&region).unwrap()
        });
        Pair { nics, peers, regions, memory }
    }

    /// A write of `bytes` from NIC 0 to NIC 1.
    fn write(&self, bytes: u64, immediate: u32, context: u64) -> Write {
        Write {
            peer: self.peers[0],
            local: self.regions[0].id,
            local_offset: 0,
            remote: self.regions[1].remote,
            remote_offset: 0,
            bytes,
            immediate,
            context,
        }
    }

    fn poll(&mut self, nic: usize) -> Vec<Completion> {
        let mut found = Vec::with_capacity(8192);
        for _ in 0..20 {
            self.nics[nic].poll(&mut found).unwrap();
        }
        found
    }

    #[track_caller]
    fn finish(self) {
        drop(self.nics);
        drop(self.memory);
        fake::with(|world| world.finish());
    }
}

fn options() -> Vec<(c_int, Vec<u8>)> {
    fake::with(|world| world.options.iter().map(|(_, option, value)| (*option, value.clone())).collect())
}

#[test]
fn efa_direct_is_preferred_and_told_everything_it_needs() {
    let library = fake::library(Behaviour::default());
    let selection = Selection::make(&library, &Settings::default(), true).unwrap();
    assert_eq!(selection.kind(), "efa-direct");
    assert_eq!(selection.nics(), ["rdmap1s0-dir", "rdmap9s0-dir"]);
    assert!(selection.reason().contains("on all 2 NICs"), "{}", selection.reason());
    let nic = Nic::open(&selection, 0, &Settings::default()).unwrap();
    let (no, yes) = (vec![0], vec![1]);
    let expected = [
        (newer::FI_OPT_CUDA_API_PERMITTED, no.clone()),
        (newer::FI_OPT_SHARED_MEMORY_PERMITTED, no),
        (newer::FI_OPT_EFA_USE_DEVICE_RDMA, yes.clone()),
        (newer::FI_OPT_EFA_HOMOGENEOUS_PEERS, yes),
        (FI_OPT_EFA_RNR_RETRY as c_int, 7usize.to_ne_bytes().to_vec()),
        (FI_OPT_FI_HMEM_P2P as c_int, 1i32.to_ne_bytes().to_vec()),
    ];
    assert_eq!(options(), expected);
    let limits = nic.limits();
    assert_eq!((limits.max_write, limits.tx_depth, limits.cq_depth), (1 << 30, 4096, 8192));
    assert!(limits.name.contains("efa-direct rdmap1s0-dir") && limits.name.contains("2.6"), "{limits:?}");
    assert!(nic.wait_fd().is_none());
    drop((nic, selection));
    fake::with(|world| world.finish());
}

#[test]
fn without_device_memory_nothing_is_asked_for_it() {
    let nic = open(Behaviour::default()).unwrap();
    assert!(options().iter().all(|(option, _)| *option != FI_OPT_FI_HMEM_P2P as c_int));
    drop(nic);
    // A device that cannot register memory of a GPU is still used; the registration is refused later.
    let behaviour = Behaviour { has_device_memory: false, ..Behaviour::default() };
    drop(open_with(behaviour, &Settings::default(), true).unwrap());
    fake::with(|world| world.finish());
}

#[test]
fn objects_are_closed_from_the_endpoint_down() {
    let mut nic = open(Behaviour::default()).unwrap();
    let mut memory = [0u8; 64];
    // SAFETY: the memory outlives the NIC.
    nic.register(&unsafe { Region::new(memory.as_mut_ptr(), 64, None) }).unwrap();
    fake::with(|world| world.closed.clear());
    drop(nic);
    fake::with(|world| {
        assert_eq!(world.closed[0], "ep", "{:?}", world.closed);
        assert_eq!(world.closed.iter().rev().take(2).collect::<Vec<_>>(), [&"fabric", &"domain"]);
        world.finish();
    });
}

#[test]
fn the_older_fabric_is_used_where_there_is_no_other() {
    let behaviour =
        Behaviour { fabrics: vec!["efa"], version: newer::version(1, 22), ..Behaviour::default() };
    let library = fake::library(behaviour);
    let selection = Selection::make(&library, &Settings::default(), false).unwrap();
    assert_eq!(selection.kind(), "efa");
    assert!(selection.reason().contains("2.4 or newer is better"), "{}", selection.reason());
    Nic::open(&selection, 1, &Settings::default()).unwrap();
}

#[test]
fn options_that_an_older_library_does_not_know_are_done_without_where_they_may() {
    for option in [
        newer::FI_OPT_CUDA_API_PERMITTED,
        newer::FI_OPT_SHARED_MEMORY_PERMITTED,
        newer::FI_OPT_EFA_HOMOGENEOUS_PEERS,
        newer::FI_OPT_MAX_RMA_SIZE,
    ] {
        open(Behaviour { unknown_options: vec![option], ..Behaviour::default() }).unwrap();
    }
    for (option, name) in [
        (newer::FI_OPT_EFA_USE_DEVICE_RDMA, "FI_OPT_EFA_USE_DEVICE_RDMA"),
        (newer::FI_OPT_EFA_EMULATED_WRITE, "FI_OPT_EFA_EMULATED_WRITE"),
    ] {
        let error = open(Behaviour { unknown_options: vec![option], ..Behaviour::default() }).err().unwrap();
        assert_eq!(error.status, Status::Unsupported);
        assert!(error.message.contains(name) && error.message.contains("2.4 or newer"), "{error}");
    }
    fake::with(|world| world.finish());
}

#[test]
fn emulated_writes_are_refused() {
    let error = open(Behaviour { emulated_write: true, ..Behaviour::default() }).err().unwrap();
    assert_eq!(error.status, Status::Unsupported);
    assert!(error.message.contains("emulate writes") && error.message.contains("rdmap1s0"), "{error}");
    fake::with(|world| world.finish());
}

#[test]
fn an_immediate_of_16_bits_is_found_at_start() {
    let error = open(Behaviour { immediate_mask: 0xffff, ..Behaviour::default() }).err().unwrap();
    assert_eq!(error.status, Status::Unsupported);
    assert!(error.message.contains("0xa5a55a5a arrived as 0x00005a5a"), "{error}");
    fake::with(|world| world.finish());
}

#[test]
fn a_table_that_is_too_short_is_an_error_that_names_the_call() {
    let word = size_of::<usize>();
    for (table, call) in [
        ("fi_ops_fabric", "fi_domain"),
        ("fi_ops_domain", "fi_cq_open"),
        ("fi_ops_mr", "fi_mr_regattr"),
        ("fi_ops_cq", "fi_cq_read"),
        ("fi_ops_av", "fi_av_insert"),
        ("fi_ops_ep", "fi_setopt"),
        ("fi_ops_cm", "fi_getname"),
        ("fi_ops_rma", "fi_writemsg"),
    ] {
        let error =
            open(Behaviour { short_table: Some((table, word)), ..Behaviour::default() }).err().unwrap();
        assert_eq!(error.status, Status::Unsupported);
        assert!(error.message.contains(call), "{table}: {error}");
        fake::with(|world| world.finish());
    }
}

#[test]
fn a_library_that_is_too_old_is_refused() {
    let behaviour = Behaviour { version: newer::version(1, 16), ..Behaviour::default() };
    let error = fake::try_library(behaviour).err().unwrap();
    assert_eq!(error.status, Status::Unsupported);
    assert!(error.message.contains("a fake is libfabric 1.16"), "{error}");
}

#[test]
fn writes_complete_in_no_order_and_each_once() {
    let mut pair = Pair::open(Behaviour { keep_back: 64, ..Behaviour::default() }, &Settings::default());
    let (mut sent, mut arrived) = (Vec::new(), Vec::new());
    for immediate in 0..500u32 {
        let write = pair.write(u64::from(immediate % 3) * 8, 0xffff_0000 + immediate, u64::from(immediate));
        assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
        if immediate % 100 == 99 {
            for completion in pair.poll(0) {
                let Completion::Sent { context } = completion else { panic!("{completion:?}") };
                sent.push(context);
            }
            for completion in pair.poll(1) {
                let Completion::Arrived { immediate } = completion else { panic!("{completion:?}") };
                arrived.push(immediate);
            }
        }
    }
    assert!(!sent.is_sorted() && !arrived.is_sorted(), "the device kept the order");
    sent.sort_unstable();
    arrived.sort_unstable();
    assert!(sent.into_iter().eq(0..500) && arrived.into_iter().eq(0xffff_0000..0xffff_0000 + 500));
    assert_eq!(pair.memory[1][..17], [[1; 16].as_slice(), &[2]].concat());
    pair.finish();
}

#[test]
fn a_storm_of_eagain_loses_and_doubles_nothing() {
    let mut pair = Pair::open(Behaviour { eagain_storm: 1000, ..Behaviour::default() }, &Settings::default());
    for context in 0..3 {
        let write = pair.write(8, context, u64::from(context));
        let mut again = 0;
        while pair.nics[0].write(&write).unwrap() == Posted::Again {
            again += 1;
        }
        assert_eq!(again, 1000);
    }
    assert_eq!((pair.poll(0).len(), pair.poll(1).len()), (3, 3));
    pair.finish();
}

#[test]
fn the_depth_is_the_bound_of_writes_in_flight() {
    let settings = Settings { tx_depth: Some(16), ..Settings::default() };
    let mut pair = Pair::open(Behaviour { keep_back: 1000, ..Behaviour::default() }, &settings);
    let write = pair.write(8, 0, 0);
    for _ in 0..16 {
        assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
    }
    assert_eq!(pair.nics[0].write(&write), Ok(Posted::Again));
    assert_eq!(pair.poll(0).len(), 16);
    assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
    pair.poll(0);
    pair.finish();
}

#[test]
fn every_number_of_the_device_has_its_class() {
    let numbers = [9, 13, 14, 15, 4124, 4126, 4127, 7, 12, 1, 8, 10];
    let mut pair = Pair::open(Behaviour::default(), &Settings::default());
    fake::with(|world| world.behaviour.errors = numbers.into());
    use FaultClass::{BadAddress, Other, Ours, PeerDead, UnknownPeer};
    let dead = PeerDead;
    let classes =
        [dead, dead, UnknownPeer, dead, dead, dead, dead, BadAddress, BadAddress, Ours, Ours, Other];
    for (number, expected) in numbers.into_iter().zip(classes) {
        let context = number as u64;
        let write = pair.write(8, 0, context);
        assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
        let found = pair.poll(0);
        let [Completion::Failed { context: Some(got), class, text }] = &found[..] else {
            panic!("{found:?}")
        };
        assert_eq!((*got, *class), (context, expected));
        assert!(text.contains("device error") && text.contains(&number.to_string()), "{text}");
    }
    assert_eq!(pair.poll(1), []);
    pair.finish();
}

#[test]
fn faults_of_the_device_itself_are_told_apart() {
    let mut pair = Pair::open(Behaviour::default(), &Settings::default());
    let class_of = |pair: &mut Pair, write: &Write| {
        assert_eq!(pair.nics[0].write(write), Ok(Posted::Yes));
        match &pair.poll(0)[..] {
            [Completion::Failed { class, .. }] => *class,
            found => panic!("{found:?}"),
        }
    };
    let good = pair.write(8, 0, 0);
    let wrong_key = RemoteRegion { key: good.remote.key ^ 1, ..good.remote };
    assert_eq!(class_of(&mut pair, &Write { remote: wrong_key, ..good }), FaultClass::BadAddress);
    let back = pair.peers[1];
    pair.nics[1].disconnect(back);
    assert_eq!(class_of(&mut pair, &good), FaultClass::UnknownPeer);
    let address = pair.nics[1].address();
    fake::with(|world| world.kill(&address));
    assert_eq!(class_of(&mut pair, &good), FaultClass::PeerDead);
    assert_eq!(pair.memory[1][..8], [2; 8]);
    pair.finish();
}

#[test]
fn a_dead_peer_that_the_post_finds_is_a_failure_and_a_bad_call_an_error() {
    let mut pair = Pair::open(Behaviour::default(), &Settings::default());
    fake::with(|world| world.behaviour.refusals = [FI_ECONNRESET, FI_EINVAL].into());
    let write = pair.write(8, 0, 77);
    assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
    assert!(!pair.nics[0].may_sleep(), "a failure waits to be polled");
    let error = pair.nics[0].write(&write).unwrap_err();
    assert!(error.message.contains("fi_writemsg"), "{error}");
    let found = pair.poll(0);
    let [Completion::Failed { context: Some(77), class: FaultClass::PeerDead, .. }] = found[..] else {
        panic!("{found:?}")
    };
    pair.finish();
}

#[test]
fn an_overrun_queue_is_the_end_of_the_nic_and_says_what_to_change() {
    let settings = Settings { tx_depth: Some(8), cq_depth: 16, ..Settings::default() };
    let mut pair = Pair::open(Behaviour::default(), &settings);
    let mut found = Vec::with_capacity(64);
    for context in 0..17 {
        let write = pair.write(0, 0, context);
        while pair.nics[0].write(&write).unwrap() == Posted::Again {}
        pair.nics[0].poll(&mut found).unwrap();
    }
    let error = loop {
        found.clear();
        if let Err(error) = pair.nics[1].poll(&mut found) {
            break error;
        }
        assert!(!found.is_empty(), "17 arrivals went into a queue of 16");
    };
    assert!(error.message.contains("more than 16 completions"), "{error}");
    assert!(error.message.contains("EP_FABRIC_CQ_DEPTH"), "{error}");
    pair.finish();
}

#[test]
fn poll_takes_no_more_than_there_is_room_for() {
    let mut pair = Pair::open(Behaviour::default(), &Settings::default());
    for immediate in 0..100 {
        let write = pair.write(0, immediate, 0);
        assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
    }
    pair.poll(0);
    let mut found = Vec::with_capacity(7);
    let (room, mut total) = (found.capacity(), 0);
    while total < 100 {
        pair.nics[1].poll(&mut found).unwrap();
        assert!(found.len() <= room && found.capacity() == room, "{}", found.len());
        total += found.len();
        found.clear();
    }
    assert_eq!(total, 100);
    pair.finish();
}

#[test]
fn a_peer_is_removed_only_after_its_last_write() {
    let mut pair = Pair::open(Behaviour { keep_back: 4, ..Behaviour::default() }, &Settings::default());
    let write = pair.write(8, 0, 0);
    assert_eq!(pair.nics[0].write(&write), Ok(Posted::Yes));
    // The fake counts a removal with a write in flight as an offence.
    let peer = pair.peers[0];
    pair.nics[0].disconnect(peer);
    assert!(pair.nics[0].write(&write).is_err(), "the id is gone at once");
    assert_eq!(pair.poll(0).len(), 1);
    // The same address again, twice: it is inserted once.
    let address = pair.nics[1].address();
    let ids = [(); 2].map(|()| pair.nics[0].connect(&address).unwrap());
    pair.nics[0].disconnect(ids[0]);
    assert_eq!(pair.nics[0].write(&Write { peer: ids[1], ..write }), Ok(Posted::Yes));
    pair.poll(0);
    pair.finish();
}

#[test]
fn addresses_of_others_are_refused() {
    let mut nic = open(Behaviour::default()).unwrap();
    for address in [vec![0xfa; 16], vec![0; 32], Vec::new()] {
        let error = nic.connect(&address).unwrap_err();
        assert_eq!(error.status, Status::Bootstrap, "{error}");
    }
}

#[test]
fn memory_of_a_device_is_registered_by_its_dma_buf() {
    let mut nic = open_with(Behaviour::default(), &Settings::default(), true).unwrap();
    let mut memory = vec![0u8; 4096];
    let file = std::fs::File::open("/dev/null").unwrap();
    let export = DmaBuf { fd: file.as_fd(), offset: 8192 };
    // SAFETY: the memory outlives the NIC.
    let region = unsafe { Region::new(memory.as_mut_ptr(), 4096, Some(export)) };
    let registered = nic.register(&region).unwrap();
    assert_eq!(registered.remote.base, memory.as_ptr().addr() as u64, "EFA names bytes by address");
    let raw = std::os::fd::AsRawFd::as_raw_fd(&file);
    fake::with(|world| {
        let seen = world.registrations.last().unwrap();
        assert_eq!((seen.flags, seen.dmabuf, seen.iface), (FI_MR_DMABUF, Some((raw, 8192)), 1));
        assert_eq!((seen.address, seen.bytes), (memory.as_ptr().addr() as u64, 4096));
    });
    nic.deregister(registered.id).unwrap();
    assert!(fake::with(|world| world.registrations.iter().all(|region| !region.open)));
    assert!(nic.deregister(RegionId(0)).is_err());
    drop(nic);
    fake::with(|world| world.finish());
}

#[test]
fn memory_of_a_device_is_refused_where_it_cannot_be_registered() {
    let file = std::fs::File::open("/dev/null").unwrap();
    let mut memory = vec![0u8; 64];
    let export = DmaBuf { fd: file.as_fd(), offset: 0 };
    // SAFETY: the memory outlives the NICs below.
    let region = unsafe { Region::new(memory.as_mut_ptr(), 64, Some(export)) };
    let older = Behaviour { version: newer::version(1, 19), ..Behaviour::default() };
    let none = Behaviour { has_device_memory: false, ..Behaviour::default() };
    for (behaviour, part) in [(older, "1.20"), (none, "cannot register memory of a device")] {
        let mut nic = open_with(behaviour, &Settings::default(), true).unwrap();
        let error = nic.register(&region).unwrap_err();
        assert_eq!(error.status, Status::Unsupported);
        assert!(error.message.contains(part), "{error}");
    }
}

#[test]
fn a_nic_can_be_handed_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<Nic>();
    is_send::<Selection>();
}
