//! Ranks that find each other through a file.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::join::{Found, Source};
use super::root::RootOptions;
use super::unique_id::{Hosting, UniqueId};
use super::{Bootstrap, Interrupter, TcpBootstrap, check_rank, failure};
use crate::error::{Error, Result};

/// One rank of a group that meets through a path which all ranks can reach.
///
/// Rank 0 creates a [`UniqueId`] (see there for `EP_BOOTSTRAP_ADDR`) and writes it to the file, which
/// only this user can read; the others wait for the file and join over TCP. Rank 0 removes the file when
/// the group has met or failed. A file that a crashed run left behind is replaced by rank 0, and the
/// others ignore it: its root is gone, refuses them, or is given up when the file changes.
#[derive(Debug)]
pub struct FileBootstrap {
    tcp: TcpBootstrap,
}

impl FileBootstrap {
    /// Joins the group of `path` as `rank` and returns when all `num_ranks` ranks have joined.
    ///
    /// # Errors
    /// As [`TcpBootstrap::connect`]; [`crate::Status::InvalidArgument`] when `rank` is not one of
    /// `num_ranks`; [`crate::Status::Bootstrap`] when the file belongs to another user, can be written by
    /// others, is no regular file, or cannot be written by rank 0.
    pub fn connect(path: &Path, rank: usize, num_ranks: usize, deadline: Instant) -> Result<FileBootstrap> {
        check_rank(rank, num_ranks)?;
        let tcp = if rank == 0 {
            let idle = deadline.saturating_duration_since(Instant::now());
            // Refused before the root starts, and again by nobody: rename replaces, it does not follow.
            check_present(path)?;
            let id = UniqueId::create_with(RootOptions { idle, ..RootOptions::default() })?;
            let _published = Published::write(path, id)?;
            TcpBootstrap::connect(&id, rank, num_ranks, deadline)?
        } else {
            TcpBootstrap::connect_from(&mut FileSource(path.to_path_buf()), rank, num_ranks, deadline)?
        };
        Ok(FileBootstrap { tcp })
    }
}

impl Bootstrap for FileBootstrap {
    fn rank(&self) -> usize {
        self.tcp.rank()
    }

    fn num_ranks(&self) -> usize {
        self.tcp.num_ranks()
    }

    fn all_gather(&mut self, mine: &[u8], deadline: Instant) -> Result<Vec<Vec<u8>>> {
        self.tcp.all_gather(mine, deadline)
    }

    fn interrupter(&self) -> Option<Interrupter> {
        self.tcp.interrupter()
    }
}

/// The file of rank 0; dropping it removes the file.
struct Published {
    path: PathBuf,
    id: UniqueId,
}

impl Published {
    /// Writes `id` beside `path` and renames it there, so that no rank reads half an id.
    fn write(path: &Path, id: UniqueId) -> Result<Published> {
        let refused =
            |error: std::io::Error| failure(format!("rank 0 could not write {}: {error}", path.display()));
        let name = path.file_name().ok_or_else(|| refused(ErrorKind::InvalidInput.into()))?;
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(|error| Error::system("getrandom", error))?;
        let mut temporary_name = std::ffi::OsString::from(".");
        temporary_name.push(name);
        temporary_name.push(format!(".{:016x}", u64::from_ne_bytes(random)));
        let temporary = path.with_file_name(temporary_name);
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let mut file = options.open(&temporary).map_err(refused)?;
        let written = file.write_all(bytemuck::bytes_of(&id)).and_then(|()| fs::rename(&temporary, path));
        if let Err(error) = written {
            let _ = fs::remove_file(&temporary);
            return Err(refused(error));
        }
        Ok(Published { path: path.to_path_buf(), id })
    }
}

impl Drop for Published {
    fn drop(&mut self) {
        // Another run may have replaced the file by its own.
        if matches!(read(&self.path), Ok(Found::Id(id)) if id == self.id) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Looks the id up each time: rank 0 may not have written it yet, or a crashed run's may lie there.
struct FileSource(PathBuf);

impl Source for FileSource {
    fn find(&mut self) -> Result<Found> {
        read(&self.0)
    }

    fn may_change(&self) -> bool {
        true
    }
}

/// Reads the id in the file. What is not there or no id is no error, as it may be replaced yet.
fn read(path: &Path) -> Result<Found> {
    let absent = |error: std::io::Error| {
        let path = path.display();
        Ok(Found::Nothing(format!(
            "{path} cannot be read ({error}); rank 0, which writes it, may not run yet"
        )))
    };
    // Before it is opened as well: opening a file of another user may be denied without a reason.
    check_present(path)?;
    let mut options = OpenOptions::new();
    // Neither another file behind a link, nor a pipe that blocks.
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = match options.open(path) {
        Ok(file) => file,
        Err(error) => return absent(error),
    };
    match file.metadata() {
        Ok(metadata) => check_trusted(path, &metadata)?,
        Err(error) => return absent(error),
    }
    let mut bytes = Vec::new();
    if let Err(error) = limited(file).read_to_end(&mut bytes) {
        return absent(error);
    }
    let id = bytemuck::try_pod_read_unaligned::<UniqueId>(&bytes).ok();
    match id.filter(|id| id.address().is_ok() && id.hosting() == Ok(Hosting::Creator)) {
        Some(id) => Ok(Found::Id(id)),
        None => Ok(Found::Nothing(format!("{} holds no unique id of libep", path.display()))),
    }
}

/// One byte more than an id, to tell a longer file.
fn limited(file: File) -> impl Read {
    file.take(size_of::<UniqueId>() as u64 + 1)
}

/// Checks the file at `path` if there is one.
fn check_present(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => check_trusted(path, &metadata),
        // The call that follows fails in the same way and says why.
        Err(_) => Ok(()),
    }
}

/// Refuses what another user may have put there: an id is an address to connect to and a secret.
fn check_trusted(path: &Path, metadata: &Metadata) -> Result<()> {
    let (path, own) = (path.display(), rustix::process::geteuid().as_raw());
    if !metadata.is_file() {
        return Err(failure(format!("the rendezvous {path} is not a regular file; name another path")));
    }
    if metadata.uid() != own {
        return Err(failure(format!(
            "the rendezvous file {path} belongs to user {}, not to user {own} who runs this rank; name another \
             path",
            metadata.uid()
        )));
    }
    if metadata.mode() & 0o022 != 0 {
        return Err(failure(format!(
            "the rendezvous file {path} can be written by other users (mode {:o}); remove it or name another \
             path",
            metadata.mode() & 0o7777
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::thread;
    use std::time::Duration;

    use super::super::tcp_tests::{create, far, soon};
    use super::*;
    use crate::Status;

    /// A directory of its own for each test, removed at the end.
    struct Dir(PathBuf);

    impl Dir {
        fn new(name: &str) -> Dir {
            let dir = std::env::temp_dir().join(format!("ep-bootstrap-{}-{name}", std::process::id()));
            fs::create_dir_all(&dir).unwrap();
            Dir(dir)
        }

        fn path(&self) -> PathBuf {
            self.0.join("rendezvous")
        }

        fn is_empty(&self) -> bool {
            fs::read_dir(&self.0).unwrap().next().is_none()
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn meet(path: &Path, num_ranks: usize, rounds: usize) {
        thread::scope(|scope| {
            for rank in 0..num_ranks {
                scope.spawn(move || {
                    let mut member = FileBootstrap::connect(path, rank, num_ranks, far()).unwrap();
                    for _ in 0..rounds {
                        let all = member.all_gather(&vec![rank as u8; rank], far()).unwrap();
                        assert!(all.iter().enumerate().all(|(rank, blob)| *blob == vec![rank as u8; rank]));
                    }
                });
            }
        });
    }

    fn put(path: &Path, bytes: &[u8]) {
        fs::write(path, bytes).unwrap();
        fs::set_permissions(path, fs::Permissions::from_mode(0o600)).unwrap();
    }

    #[test]
    fn ranks_meet_and_the_file_is_removed() {
        let dir = Dir::new("meet");
        for num_ranks in [1, 2, 5] {
            meet(&dir.path(), num_ranks, 3);
            assert!(dir.is_empty());
        }
    }

    #[test]
    fn groups_follow_each_other_without_a_pause() {
        let dir = Dir::new("follow");
        let path = dir.path();
        thread::scope(|scope| {
            for rank in 0..3 {
                let path = &path;
                scope.spawn(move || {
                    for _ in 0..10 {
                        FileBootstrap::connect(path, rank, 3, far()).unwrap().all_gather(b"", far()).unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn stale_file_of_a_root_that_is_gone_does_not_matter() {
        let dir = Dir::new("gone");
        let (id, root) = create();
        root.stop();
        put(&dir.path(), bytemuck::bytes_of(&id));
        meet(&dir.path(), 3, 1);
    }

    #[test]
    fn stale_file_of_a_root_that_still_waits_does_not_matter() {
        let dir = Dir::new("waits");
        let (id, root) = create();
        put(&dir.path(), bytemuck::bytes_of(&id));
        let path = dir.path();
        thread::scope(|scope| {
            let early = scope.spawn(|| FileBootstrap::connect(&path, 1, 2, far()).unwrap());
            thread::sleep(Duration::from_millis(100));
            let first = FileBootstrap::connect(&path, 0, 2, far()).unwrap();
            assert_eq!((first.rank(), early.join().unwrap().rank()), (0, 1));
        });
        root.stop();
    }

    #[test]
    fn garbage_in_the_file_does_not_matter() {
        let dir = Dir::new("garbage");
        for bytes in [&b""[..], &[0; 128], &[0xff; 127], &[7; 4096]] {
            put(&dir.path(), bytes);
            meet(&dir.path(), 2, 1);
        }
    }

    #[test]
    fn file_is_for_its_owner_alone_and_goes_when_the_group_fails() {
        let dir = Dir::new("mode");
        let path = dir.path();
        thread::scope(|scope| {
            let alone = scope.spawn(|| FileBootstrap::connect(&path, 0, 2, soon(400)).unwrap_err());
            while !path.exists() {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
            let error = alone.join().unwrap();
            assert!(error.message.starts_with("rank 1 of 2 did not join"), "{error}");
        });
        assert!(dir.is_empty());
    }

    #[test]
    fn absent_file_is_told_at_the_deadline() {
        let dir = Dir::new("absent");
        let start = Instant::now();
        let error = FileBootstrap::connect(&dir.path(), 1, 2, soon(150)).unwrap_err();
        assert!(start.elapsed() < Duration::from_millis(1150));
        assert_eq!(error.status, Status::Bootstrap);
        assert!(error.message.contains("rank 0, which writes it, may not run yet"), "{error}");
    }

    #[test]
    fn file_that_others_control_is_refused_by_all() {
        let dir = Dir::new("foreign");
        let path = dir.path();
        put(&path, &[0; 128]);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o622)).unwrap();
        let refused = |path: &Path, expected: &str| {
            for rank in [0, 1] {
                let error = FileBootstrap::connect(path, rank, 2, far()).unwrap_err();
                assert!(error.message.contains(expected), "{error}");
            }
        };
        refused(&path, "can be written by other users (mode 622)");
        refused(&dir.0, "not a regular file");
        let link = dir.0.join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        refused(&link, "not a regular file");
        // As the superuser give a file away; any other user finds one that is not theirs.
        if rustix::process::geteuid().is_root() {
            put(&path, &[0; 128]);
            std::os::unix::fs::chown(&path, Some(12345), None).unwrap();
            refused(&path, "belongs to user 12345, not to user 0");
        } else {
            refused(Path::new("/etc/passwd"), "belongs to user 0");
        }
    }
}
