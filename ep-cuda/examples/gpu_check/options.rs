//! The command line: `name=value`.

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    All,
    Check,
    Bench,
    Graph,
    Faults,
    Litmus,
    Alone,
}

#[derive(Clone, Debug)]
pub struct Options {
    pub ranks: usize,
    pub tokens: usize,
    pub hidden: usize,
    pub topk: usize,
    pub experts: usize,
    pub sms: u32,
    pub what: What,
    /// Random cases of the check.
    pub cases: usize,
    pub seed: u64,
    /// Of the litmus.
    pub rounds: usize,
    pub timeout_ms: u32,
    /// Ranks are threads.
    pub threads: bool,
    /// Measure only the rows whose names begin so.
    pub only: String,
}

impl Options {
    pub fn parse(arguments: &[String]) -> Result<Options, String> {
        let mut options = Options {
            ranks: 4,
            tokens: 4096,
            hidden: 7168,
            topk: 8,
            experts: 256,
            sms: 24,
            what: What::All,
            cases: 24,
            seed: 1,
            rounds: 1_000_000,
            timeout_ms: 10_000,
            threads: false,
            only: String::new(),
        };
        for argument in arguments {
            let (name, value) = argument.split_once('=').ok_or(format!("'{argument}' is not name=value"))?;
            let number = || value.parse::<usize>().map_err(|_| format!("'{argument}' needs a number"));
            match name {
                "ranks" => options.ranks = number()?,
                "tokens" => options.tokens = number()?,
                "hidden" => options.hidden = number()?,
                "topk" => options.topk = number()?,
                "experts" => options.experts = number()?,
                "sms" => options.sms = number()? as u32,
                "cases" => options.cases = number()?,
                "seed" => options.seed = number()? as u64,
                "rounds" => options.rounds = number()?,
                "timeout_ms" => options.timeout_ms = number()? as u32,
                "only" => options.only = value.replace('_', " "),
                "threads" => options.threads = number()? != 0,
                "what" => {
                    options.what = match value {
                        "all" => What::All,
                        "check" => What::Check,
                        "bench" => What::Bench,
                        "graph" => What::Graph,
                        "faults" => What::Faults,
                        "litmus" => What::Litmus,
                        "alone" => What::Alone,
                        _ => {
                            return Err(format!(
                                "'{argument}': expected all, check, bench, graph, faults, litmus or alone"
                            ));
                        }
                    }
                }
                _ => return Err(format!("'{name}' is unknown; see the top of gpu_check/main.rs")),
            }
        }
        Ok(options)
    }
}
