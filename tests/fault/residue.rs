//! What a rank leaves behind, however it ends, and what a stranger can get of it while it lives: nothing.

use std::collections::HashSet;
use std::fs;
use std::io::{IoSliceMut, Read};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::time::{Duration, Instant};

use ep_core::bootstrap::{Bootstrap, FileBootstrap};
use ep_core::config::Layout;
use ep_core::engine::{Group, Window};
use ep_core::perturb::Perturb;

use crate::process::{self, Rank, Scratch, become_nobody, role, say};
use crate::threads::{LONG, config};
use crate::work::{Member, Place, Shape};

/// Names of the abstract sockets of libep that a process has open, by way of their inodes.
fn sockets_of(pid: libc::pid_t) -> HashSet<String> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).expect("the process is there");
    let links = links.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    let inode = |link: &Path| Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_string());
    let inodes: HashSet<String> = links.filter_map(|link| inode(&link)).collect();
    unix_sockets().into_iter().filter(|(inode, _)| inodes.contains(inode)).map(|(_, name)| name).collect()
}

/// Inode and name of every socket of libep on this machine.
fn unix_sockets() -> Vec<(String, String)> {
    let table = fs::read_to_string("/proc/net/unix").expect("Linux has it");
    let row = |line: &str| {
        let mut words = line.split_whitespace().skip(6);
        let (inode, name) = (words.next()?, words.next()?);
        name.starts_with("@libep").then(|| (inode.to_string(), name.to_string()))
    };
    table.lines().filter_map(row).collect()
}

fn assert_sockets_gone(names: &HashSet<String>) {
    // The kernel closes a killed process's sockets before its parent can reap it.
    let left: Vec<_> = unix_sockets().into_iter().filter(|(_, name)| names.contains(name)).collect();
    assert!(left.is_empty(), "{left:?}");
}

/// The process shares memory through nothing that has a name.
fn assert_nameless(pid: libc::pid_t) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("the process is there");
    let shared: Vec<&str> = maps.lines().filter(|line| line.contains("s 0")).collect();
    assert!(shared.iter().any(|line| line.contains("/memfd:ep (deleted)")), "{maps}");
    let named = shared.iter().find(|line| !line.contains("/memfd:ep (deleted)"));
    assert!(named.is_none(), "{named:?} has a name");
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).expect("the process is there") {
        let path = entry.expect("it is listed").path();
        // Standard streams are the test's, and may go to a file.
        if path.ends_with("0") || path.ends_with("1") || path.ends_with("2") {
            continue;
        }
        let link = fs::read_link(path).unwrap_or_default();
        let link = link.to_string_lossy();
        assert!(!link.starts_with("/dev/shm") && !link.starts_with("/tmp"), "{link} is open");
    }
}

fn shm_names() -> HashSet<String> {
    let names = fs::read_dir("/dev/shm").map(|entries| {
        entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned())).collect()
    });
    names.unwrap_or_default()
}

/// A rank of a group with a window. It ends as it is told; a survivor that is told so leaves first.
fn play(role: &[String]) {
    let (rank, num_ranks) = (role[0].parse().unwrap(), role[1].parse().unwrap());
    let shape = Shape::small(num_ranks, Layout::ExpertMajor, Place::Window);
    let group = process::meet(Path::new(&role[2]), rank, num_ranks, &config(LONG), Perturb::none());
    let mut member = Member::new(&group, shape).unwrap();
    let extra = Window::allocate(&group, 8 << 20).unwrap();
    member.round(1).unwrap();
    say("made");
    match &*process::hear() {
        "exit" => std::process::exit(3),
        "panic" => {
            // Not shown: it would look like a failure.
            std::panic::set_hook(Box::new(|_| ()));
            panic!("as its test wants");
        }
        "leave" => {}
        other => unreachable!("{other:?}"),
    }
    group.close(LONG).unwrap();
    drop((member, extra, group));
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    assert!(!maps.contains("memfd:ep"), "still mapped: {maps}");
    assert_eq!(sockets_of(std::process::id() as libc::pid_t), HashSet::new());
    say("left");
    process::hear();
}

#[test]
fn ranks_leave_nothing_behind_however_they_end() {
    if let Some(role) = role() {
        return play(&role);
    }
    let scratch = Scratch::new();
    let shm_before = shm_names();
    let spawn = |rank: usize| {
        let role = format!("{rank} 5 {}", scratch.file("meet").display());
        Rank::spawn("residue::ranks_leave_nothing_behind_however_they_end", &role, &scratch)
    };
    let mut ranks: Vec<Rank> = (0..5).map(spawn).collect();
    ranks.iter().for_each(|rank| drop(rank.await_line("made")));
    let sockets: HashSet<String> = ranks.iter().flat_map(|rank| sockets_of(rank.pid())).collect();
    assert!(!sockets.is_empty(), "the test sees sockets while they are there");
    ranks.iter().for_each(|rank| assert_nameless(rank.pid()));
    let in_use: Vec<_> = shm_names().difference(&shm_before).cloned().collect();

    let mut ranks = ranks.drain(..);
    let mut next = || ranks.next().expect("five ranks");
    let (mut leaver, killed, mut exited, mut panicked, aborted) = (next(), next(), next(), next(), next());
    killed.signal(libc::SIGKILL);
    killed.finish_killed();
    exited.tell("exit");
    assert_eq!(exited.wait().code(), Some(3));
    panicked.tell("panic");
    assert!(!panicked.wait().success());
    aborted.signal(libc::SIGABRT);
    assert!(!aborted.wait().success());
    leaver.tell("leave");
    leaver.await_line("left");
    assert_sockets_gone(&sockets);
    leaver.tell("end");
    leaver.finish();

    let files: Vec<_> = fs::read_dir(scratch.path()).unwrap().collect();
    assert!(files.is_empty(), "{files:?}");
    let names = shm_names();
    let left: Vec<_> = in_use.iter().filter(|name| name.contains("ep") && names.contains(*name)).collect();
    assert!(left.is_empty(), "{left:?} in /dev/shm");
}

/// A bootstrap that tells the parent the secret of rank 0's socket, as rank 1 learns it, and lets rank 1
/// go on when the parent says so.
struct Telltale {
    bootstrap: FileBootstrap,
    rounds: usize,
    secret: [u8; 16],
}

impl Bootstrap for Telltale {
    fn rank(&self) -> usize {
        self.bootstrap.rank()
    }

    fn num_ranks(&self) -> usize {
        self.bootstrap.num_ranks()
    }

    fn all_gather(&mut self, mine: &[u8], deadline: Instant) -> ep_core::Result<Vec<Vec<u8>>> {
        let all = self.bootstrap.all_gather(mine, deadline)?;
        self.rounds += 1;
        match self.rounds {
            // The hello of a rank ends with the secret.
            1 => self.secret = *all[0].last_chunk::<16>().expect("a hello is longer"),
            // They know each other's memory, and connect next.
            2 if self.rank() == 1 => {
                let digits = self.secret.iter().map(|byte| format!("{byte:02x}"));
                say(format!("secret {}", digits.collect::<String>()));
                process::hear();
            }
            _ => {}
        }
        Ok(all)
    }
}

/// A rank whose socket listens, since others are to come; its parent decides when they do.
fn play_host(role: &[String]) {
    let rank = role[1].parse().unwrap();
    let limit = role.get(3).map_or(LONG, |ms| Duration::from_millis(ms.parse().unwrap()));
    let deadline = Instant::now() + limit;
    let path = Path::new(&role[2]);
    let bootstrap = FileBootstrap::connect(path, rank, 2, deadline).unwrap();
    say("met");
    let group =
        Group::create(&config(LONG), Box::new(Telltale { bootstrap, rounds: 0, secret: [0; 16] }), deadline);
    let group = match group {
        Ok(group) => group,
        Err(error) => return say(format!("failed {error}")),
    };
    let shape = Shape::small(2, Layout::Flat, Place::Window);
    Member::new(&group, shape).unwrap().round(3).unwrap();
    say("made");
    process::hear();
}

/// Two ranks that have met; rank 0 listens, rank 1 has yet to come.
fn spawn_hosts(test: &str, scratch: &Scratch) -> [Rank; 2] {
    let path = scratch.file("meet");
    let hosts = [0, 1].map(|rank| Rank::spawn(test, &format!("host {rank} {}", path.display()), scratch));
    hosts.iter().for_each(|host| drop(host.await_line("met")));
    hosts
}

/// The name under which rank 0 listens.
fn listening(host: &Rank) -> String {
    let deadline = Instant::now() + LONG;
    loop {
        if let Some(name) = sockets_of(host.pid()).into_iter().next() {
            return name;
        }
        assert!(Instant::now() < deadline, "rank 0 does not listen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn rank_killed_while_it_listens_leaves_no_socket() {
    if let Some(role) = role() {
        return play_host(&role);
    }
    let scratch = Scratch::new();
    let [host, other] = spawn_hosts("residue::rank_killed_while_it_listens_leaves_no_socket", &scratch);
    let name = listening(&host);
    host.signal(libc::SIGKILL);
    host.finish_killed();
    assert_sockets_gone(&HashSet::from([name]));
    drop(other);
    let files: Vec<_> = fs::read_dir(scratch.path()).unwrap().collect();
    assert!(files.is_empty(), "{files:?}");
}

/// Rank 1 dies when rank 0 knows it already and waits for its connection.
#[test]
fn rank_killed_while_another_connects_to_it_is_named_at_once() {
    if let Some(role) = role() {
        return play_host(&role);
    }
    let test = "residue::rank_killed_while_another_connects_to_it_is_named_at_once";
    let scratch = Scratch::new();
    let [host, other] = spawn_hosts(test, &scratch);
    other.await_line("secret");
    std::thread::sleep(Duration::from_millis(100));
    other.signal(libc::SIGKILL);
    let died = Instant::now();
    let (when, error) = host.await_line("failed");
    assert!(error.contains("EP_ERR_BOOTSTRAP") && error.contains("rank 1"), "{error}");
    assert!(when.saturating_duration_since(died) < Duration::from_secs(1), "{error}");
    host.finish();
    other.finish_killed();
}

/// Rank 1 is late when rank 0 knows it already and waits for its connection.
#[test]
fn rank_that_does_not_connect_is_named_at_the_deadline() {
    if let Some(role) = role() {
        return play_host(&role);
    }
    let test = "residue::rank_that_does_not_connect_is_named_at_the_deadline";
    let scratch = Scratch::new();
    let path = scratch.file("meet");
    let spawn = |rank| Rank::spawn(test, &format!("host {rank} {} 1500", path.display()), &scratch);
    let (host, mut late) = (spawn(0), spawn(1));
    late.await_line("secret");
    let (_, error) = host.await_line("failed");
    assert!(error.contains("EP_ERR_BOOTSTRAP: rank 1 did not connect"), "{error}");
    host.finish();
    late.tell("come");
    // The server of the meeting tells it that it was the late one.
    let (_, error) = late.await_line("failed");
    assert!(error.contains("EP_ERR_BOOTSTRAP: rank 1 of 2 did not take part"), "{error}");
    late.finish();
}

/// Connects to `name` in the role of rank 1 and says whether anything came before the socket was closed.
fn steal(name: &str, secret: &str) -> Result<(), String> {
    let name = name.strip_prefix('@').expect("an abstract name");
    // SAFETY: plain system call.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    assert!(fd >= 0);
    // SAFETY: just made, and nobody else has it.
    let socket = unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(fd) };
    let mut address = libc::sockaddr_un { sun_family: libc::AF_UNIX as u16, sun_path: [0; 108] };
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    let length = (3 + name.len()) as libc::socklen_t;
    // SAFETY: the address is as long as said.
    let connected = unsafe { libc::connect(fd, (&raw const address).cast(), length) } == 0;
    say(format!("connected {connected}"));
    if !connected {
        return Ok(());
    }
    let mut hello = [0u8; 20];
    for (at, byte) in hello[..16].iter_mut().enumerate() {
        *byte = u8::from_str_radix(&secret[2 * at..2 * at + 2], 16).expect("hex");
    }
    hello[16] = 1;
    // SAFETY: the buffer is as long as said.
    let sent = unsafe { libc::send(fd, hello.as_ptr().cast(), hello.len(), libc::MSG_NOSIGNAL) };
    let (mut bytes, mut control) = ([0u8; 64], [0u64; 32]);
    let mut slice = IoSliceMut::new(&mut bytes);
    // SAFETY: all zero is a message without parts.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = (&raw mut slice).cast();
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message names buffers that live until the call returns.
    let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, 0) };
    // A failed call, such as on a connection that was reset, leaves the message as it was.
    if received > 0 || (received == 0 && message.msg_controllen > 0) {
        let control = message.msg_controllen;
        return Err(format!("sent {sent}, got {received} bytes and {control} bytes of descriptors"));
    }
    Ok(())
}

/// Tries to get at the memory of process `pid`, which listens at `name`. A thief of another user first
/// becomes nobody; he knows the whole secret. One of the same user knows the half that is in the name.
fn play_thief(role: &[String]) {
    let (pid, name, secret) = (&role[2], &role[3], &role[4]);
    if role[1] == "nobody" {
        become_nobody();
        let files = ["fd", "map_files"].map(|name| format!("/proc/{pid}/{name}"));
        assert!(
            files.iter().all(|path| fs::read_dir(path).is_err()),
            "the descriptors of {pid} can be listed"
        );
        for number in 0..64 {
            assert!(
                fs::File::open(format!("/proc/{pid}/fd/{number}")).is_err(),
                "opened descriptor {number}"
            );
        }
        let memory = fs::File::open(format!("/proc/{pid}/mem")).and_then(|mut file| file.read(&mut [0; 8]));
        assert!(memory.is_err(), "read the memory of {pid}");
    }
    match steal(name, secret) {
        Ok(()) => say("empty-handed"),
        Err(loot) => say(format!("loot {loot}")),
    }
}

fn check_thief(test: &str, user: &str) {
    let scratch = Scratch::new();
    let [mut host, mut other] = spawn_hosts(test, &scratch);
    let name = listening(&host);
    let mut secret = other.await_line("secret").1;
    assert_eq!(name, format!("@libep-{}", &secret[..16]));
    if user != "nobody" {
        secret.replace_range(31.., if secret.ends_with('0') { "1" } else { "0" });
    }
    let thief = Rank::spawn(test, &format!("thief {user} {} {name} {secret}", host.pid()), &scratch);
    assert_eq!(thief.await_line("connected").1, "true", "the listener is open to connections");
    thief.await_line("empty-handed");
    thief.finish();
    other.tell("come");
    for rank in [&mut host, &mut other] {
        rank.await_line("made");
        rank.tell("end");
    }
    host.finish();
    other.finish();
}

#[test]
fn process_of_another_user_gets_no_memory() {
    if let Some(role) = role() {
        return if role[0] == "host" { play_host(&role) } else { play_thief(&role) };
    }
    // SAFETY: plain system call.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can become another user");
        return;
    }
    check_thief("residue::process_of_another_user_gets_no_memory", "nobody");
}

#[test]
fn process_of_the_same_user_without_the_secret_gets_no_memory() {
    if let Some(role) = role() {
        return if role[0] == "host" { play_host(&role) } else { play_thief(&role) };
    }
    check_thief("residue::process_of_the_same_user_without_the_secret_gets_no_memory", "same");
}

#[test]
fn the_tables_of_the_system_are_read_right() {
    let name = format!("libep-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    let name = format!("@{name}");
    assert!(sockets_of(std::process::id() as libc::pid_t).contains(&name));
    drop(listener);
    assert_sockets_gone(&HashSet::from([name]));
}
