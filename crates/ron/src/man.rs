//! The man page: every command with its options on one page, so that none is named that has no page.

use crate::cli::Cli;
use clap::{Command, CommandFactory as _};
use clap_mangen::Man;

/// What stands behind the commands.
const REST: &str = r#".SH "EXIT STATUS"
.TP
0
done
.TP
1
failed: a start, a check, or a request that was refused
.TP
64
bad usage or configuration
.SH ENVIRONMENT
.TP
RON_SECTION__KEY
sets a key of the configuration, such as RON_GATEWAY__MAX_CONNS=10000; \-\-set goes before it, the file behind
.TP
RON_TOKEN
a capability, or the admin token, for commands that ask a running node
.TP
RON_ADMIN__TOKEN
the admin token, of a node and for commands that ask it
.SH FILES
.TP
ron\-data/ron.toml
the configuration, made by the first "ron up" or by "ron init"
.TP
ron\-data/node.key, ron\-data/admin.token
the node's key and the token of its admin plane, readable by their owner only
.TP
ron\-data/addresses.json
where a running node listens
"#;

/// The page, in the language of troff.
pub(crate) fn page() -> std::io::Result<Vec<u8>> {
    let mut command = bare(Cli::command());
    command.build();
    let (man, mut out) = (Man::new(command.clone()), Vec::new());
    man.render_title(&mut out)?;
    man.render_name_section(&mut out)?;
    out.extend_from_slice(b".SH SYNOPSIS\n\\fBron\\fR \\fICOMMAND\\fR [\\fIOPTIONS\\fR]\n.SH COMMANDS\n");
    describe(&command, &mut out)?;
    out.extend_from_slice(REST.as_bytes());
    man.render_version_section(&mut out)?;
    Ok(out)
}

/// Without the flags that every command has.
fn bare(command: Command) -> Command {
    command
        .disable_help_flag(true)
        .disable_version_flag(true)
        .disable_help_subcommand(true)
        .mut_subcommands(bare)
}

/// Writes a section for each command that does something itself.
fn describe(command: &Command, out: &mut Vec<u8>) -> std::io::Result<()> {
    for command in command.get_subcommands().filter(|command| !command.is_hide_set()) {
        if command.has_subcommands() {
            describe(command, out)?;
            continue;
        }
        let name = command.get_bin_name().unwrap_or(command.get_name());
        out.extend_from_slice(format!(".SS \"{}\"\n", name.replace('-', "\\-")).as_bytes());
        let (man, mut section) = (Man::new(command.clone()), Vec::new());
        man.render_synopsis_section(&mut section)?;
        man.render_description_section(&mut section)?;
        if command.get_arguments().next().is_some() {
            man.render_options_section(&mut section)?;
        }
        // A section of one command is a part of the section of all of them.
        let section =
            String::from_utf8_lossy(&section).replace(".SH SYNOPSIS\n", "").replace(".SH OPTIONS\n", "");
        let preamble = |line: &&str| !line.starts_with(".ie ") && !line.starts_with(".el ");
        for line in section.replace(".SH DESCRIPTION\n", ".PP\n").lines().filter(preamble) {
            out.extend_from_slice(line.as_bytes());
            out.push(b'\n');
        }
    }
    Ok(())
}
