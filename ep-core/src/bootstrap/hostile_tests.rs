//! What a root does with connections that are no ranks, or ranks that misbehave.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use super::auth::{self, Side, Transcript};
use super::root::RootOptions;
use super::tcp_tests::{connect_all, create, far, gather_all, soon};
use super::wire::{self, Frame, Greeting, Join, Kind};
use super::*;

/// A small xorshift generator; the seed is printed when a test fails.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.next() as u8).collect()
    }
}

fn dial(id: &UniqueId) -> TcpStream {
    let stream = TcpStream::connect(id.address().unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream
}

/// Authenticates by hand as `rank`.
fn authenticate(id: &UniqueId, rank: u32, num_ranks: u32) -> TcpStream {
    let mut stream = dial(id);
    let rank_nonce = auth::nonce().unwrap();
    stream.write_all(&Greeting::new(rank_nonce).encode()).unwrap();
    let mut answer = [0; wire::GREETING_BYTES];
    stream.read_exact(&mut answer).unwrap();
    let root_nonce = Greeting::decode(&answer).unwrap().nonce;
    let remaining = Duration::from_secs(60);
    let join = Join { rank, num_ranks, remaining, timeout: remaining, process: 0 }.encode();
    let transcript = Transcript { rank_nonce: &rank_nonce, root_nonce: &root_nonce, join: &join };
    stream.write_all(&join).unwrap();
    stream.write_all(&auth::prove(id.secret(), Side::Rank, &transcript)).unwrap();
    let mut verdict = [0; wire::VERDICT_BYTES];
    stream.read_exact(&mut verdict).unwrap();
    assert!(auth::verify(id.secret(), Side::Root, &transcript, &verdict[4..]));
    stream
}

/// Whether the root has closed the connection; what it sent before is of no matter.
fn is_closed(mut stream: TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn garbage_and_truncated_messages_do_not_disturb_a_group() {
    const SEED: u64 = 0x5eed_0001;
    println!("seed {SEED:#x}");
    let mut random = Random(SEED);
    let id = create().0;
    let hello = Greeting::new([3; 32]).encode();
    thread::scope(|scope| {
        let waiting = scope.spawn(move || TcpBootstrap::connect(&id, 0, 2, far()).unwrap());
        for case in 0..200 {
            let mut stream = dial(&id);
            let length = random.below(300);
            let mut bytes = match case % 3 {
                0 => random.bytes(length),
                1 => hello[..random.below(hello.len())].to_vec(),
                _ => [&hello[..], &random.bytes(length)].concat(),
            };
            if case % 5 == 0 && !bytes.is_empty() {
                let index = random.below(bytes.len());
                bytes[index] ^= 1 << random.below(8);
            }
            // The root may have closed it in the middle, which is what it should do.
            let _ = stream.write_all(&bytes);
        }
        let other = TcpBootstrap::connect(&id, 1, 2, far()).unwrap();
        gather_all(&mut [waiting.join().unwrap(), other], 2);
    });
}

#[test]
fn other_protocols_and_wrong_proofs_are_dropped() {
    let (id, _root) = create();
    let mut web = dial(&id);
    web.write_all(b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\n\r\n").unwrap();
    assert!(is_closed(web));
    let mut liar = dial(&id);
    liar.write_all(&Greeting::new([1; 32]).encode()).unwrap();
    liar.write_all(&[0; wire::PROOF_BYTES]).unwrap();
    assert!(is_closed(liar));
}

#[test]
fn other_version_is_told_to_the_rank() {
    let (id, _root) = create();
    let mut old = dial(&id);
    old.write_all(&Greeting { version: 77, nonce: [0; 32] }.encode()).unwrap();
    let mut answer = [0; wire::GREETING_BYTES];
    old.read_exact(&mut answer).unwrap();
    assert_eq!(Greeting::decode(&answer).unwrap().version, wire::VERSION);
    assert!(is_closed(old));

    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId::from_address(&listener.local_addr().unwrap().to_string(), "x").unwrap();
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&Greeting { version: 77, nonce: [0; 32] }.encode()).unwrap();
            let _ = stream.read_exact(&mut [0; wire::GREETING_BYTES]);
        });
        let error = TcpBootstrap::connect(&id, 1, 2, far()).unwrap_err();
        assert!(error.message.contains("speaks version 77 of the bootstrap protocol"), "{error}");
    });
}

#[test]
fn rogue_root_without_the_secret_is_not_believed() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let id = UniqueId::from_address(&listener.local_addr().unwrap().to_string(), "x").unwrap();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    thread::scope(|scope| {
        scope.spawn(move || {
            listener.set_nonblocking(true).unwrap();
            while stopped.try_recv().is_err() {
                let Ok((mut stream, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(2));
                    continue;
                };
                stream.set_nonblocking(false).unwrap();
                let _ = stream.write_all(&Greeting::new([0; 32]).encode());
                let _ = stream.read_exact(&mut [0; wire::GREETING_BYTES + wire::PROOF_BYTES]);
                let _ = stream.write_all(&[0; wire::VERDICT_BYTES]);
            }
        });
        let error = TcpBootstrap::connect(&id, 1, 2, far()).unwrap_err();
        stop.send(()).unwrap();
        assert!(error.message.contains("could not prove that it knows the secret"), "{error}");
    });
}

#[test]
fn silent_and_slow_connections_are_dropped_in_time() {
    let options = RootOptions { handshake: Duration::from_millis(300), ..RootOptions::default() };
    let (id, _root) = UniqueId::create_at(SocketAddr::from(([127, 0, 0, 1], 0)), options).unwrap();
    let silent = dial(&id);
    let mut slow = dial(&id);
    let hello = Greeting::new([3; 32]).encode();
    let start = Instant::now();
    // Far more slowly than it may: the whole hello would take 2.2 s.
    for byte in hello {
        if slow.write_all(&[byte]).is_err() {
            break;
        }
        thread::sleep(Duration::from_millis(50));
        if start.elapsed() > Duration::from_millis(900) {
            break;
        }
    }
    assert!(is_closed(slow) && is_closed(silent));
}

#[test]
fn crowd_of_silent_connections_does_not_keep_ranks_out() {
    let id = create().0;
    let crowd: Vec<_> = (0..300).map(|_| dial(&id)).collect();
    let members = connect_all(&id, &[(0, 3), (1, 3), (2, 3)], far());
    let mut members: Vec<_> = members.into_iter().map(|member| member.unwrap()).collect();
    gather_all(&mut members, 2);
    drop(crowd);
}

#[test]
fn rank_that_dies_in_the_middle_of_its_blob_is_named() {
    let id = create().0;
    thread::scope(|scope| {
        let honest = scope.spawn(move || {
            let mut member = TcpBootstrap::connect(&id, 0, 2, far()).unwrap();
            member.all_gather(b"x", far()).unwrap_err()
        });
        let mut dying = authenticate(&id, 1, 2);
        let head = Frame { kind: Kind::Gather, bytes: 1000, round: 0, remaining: Duration::from_secs(60) };
        dying.read_exact(&mut [0; wire::FRAME_BYTES]).unwrap();
        dying.write_all(&head.encode()).unwrap();
        dying.write_all(&[0; 500]).unwrap();
        drop(dying);
        let error = honest.join().unwrap();
        assert!(error.message.starts_with("rank 1 of 2 left or died before all-gather round 1"), "{error}");
    });
}

#[test]
fn rank_that_stalls_in_the_middle_of_its_blob_is_named() {
    let id = create().0;
    thread::scope(|scope| {
        let honest = scope.spawn(move || {
            let mut member = TcpBootstrap::connect(&id, 0, 2, far()).unwrap();
            member.all_gather(b"x", soon(200)).unwrap_err()
        });
        let mut stalled = authenticate(&id, 1, 2);
        let head = Frame { kind: Kind::Gather, bytes: 1 << 25, round: 0, remaining: Duration::from_secs(60) };
        stalled.write_all(&head.encode()).unwrap();
        let error = honest.join().unwrap();
        assert!(error.message.starts_with("rank 1 of 2 did not take part in all-gather"), "{error}");
    });
}

#[test]
fn rank_that_sends_garbage_frames_fails_the_group_by_name() {
    const SEED: u64 = 0x5eed_0002;
    println!("seed {SEED:#x}");
    let mut random = Random(SEED);
    let valid = Frame { kind: Kind::Gather, bytes: 4, round: 0, remaining: Duration::from_secs(60) };
    for case in 0..40 {
        let id = create().0;
        let mut bytes = match case % 2 {
            0 => random.bytes(wire::FRAME_BYTES),
            _ => valid.encode().to_vec(),
        };
        match case % 4 {
            1 => bytes[8..16].copy_from_slice(&(random.next() | 1 << 40).to_le_bytes()),
            3 => bytes[16..24].copy_from_slice(&(random.next() | 1).to_le_bytes()),
            _ => {}
        }
        bytes.extend_from_slice(&[0; 4]);
        thread::scope(|scope| {
            let honest = scope.spawn(move || {
                let mut member = TcpBootstrap::connect(&id, 0, 2, far())?;
                member.all_gather(b"x", far())
            });
            let mut rogue = authenticate(&id, 1, 2);
            rogue.write_all(&bytes).unwrap();
            let error = honest.join().unwrap().unwrap_err();
            assert_eq!(error.status, Status::Bootstrap);
            assert!(error.message.starts_with("rank 1 "), "case {case}: {error}");
        });
    }
}

#[test]
fn rank_that_gathers_before_all_have_joined_fails_the_group_by_name() {
    let id = create().0;
    let mut eager = authenticate(&id, 1, 2);
    eager.write_all(&Frame::with_payload(Kind::Gather, 0, b"early")).unwrap();
    let error = TcpBootstrap::connect(&id, 0, 2, far()).unwrap_err();
    assert!(error.message.starts_with("rank 1 gathers before all ranks have joined"), "{error}");
}
