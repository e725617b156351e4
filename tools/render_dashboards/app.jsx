// One dashboard, drawn from a live Prometheus with Grafana's own components: field options, units, thresholds,
// transformations, panel frames, time series, stats and tables are Grafana's code. State timelines are drawn by bands.jsx,
// since Grafana publishes that panel in its server only.
//
// ?dashboard=FILE&prometheus=URL&theme=dark|light&from=SECONDS&to=SECONDS&rate=20s&var-NAME=VALUE
import '@fontsource/inter/400.css';
import '@fontsource/inter/500.css';
import {
  ThemeContext, applyFieldOverrides, createFieldConfigRegistry, createTheme, dateTime, getFieldDisplayName,
  getFieldDisplayValues, standardEditorsRegistry, standardFieldConfigEditorRegistry, standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import * as dataAll from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { BigValue, GlobalStyles, PanelChrome, TimeSeries, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { lastValueFrom } from 'rxjs';
import { marksOf, withMarks } from './annotations.js';
import { Bands } from './bands.jsx';
import { asked, framesOf } from './frames.js';

const from = Number(asked.get('from')), to = Number(asked.get('to'));
const CELL = 30, GAP = 8, COLUMNS = 24, HEADER = 40;
const theme = createTheme({ colors: { mode: asked.get('theme') || 'dark' } });
const timeRange = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: 'now-1h', to: 'now' } };

async function prepared(panel) {
  // The published TimeSeries gives lines and legend different colours by name; Grafana's own panel does not.
  const color = panel.fieldConfig.defaults.color;
  if (color?.mode === 'palette-classic-by-name') color.mode = 'palette-classic';
  let data = await framesOf(panel, from, to);
  if (panel.transformations?.length) data = await lastValueFrom(transformDataFrame(panel.transformations, data));
  const registry = createFieldConfigRegistry({ useCustomConfig: addCustom }, 'panel');
  const shown = applyFieldOverrides({
    data: named(data), fieldConfig: panel.fieldConfig, fieldConfigRegistry: registry, theme, timeZone: 'utc',
    replaceVariables: (text) => text,
  });
  return named(shown);
}

// Panels look names up in `state`, where Grafana's query runner puts them; colours by name follow from them.
function named(frames) {
  for (const frame of frames) for (const field of frame.fields) {
    field.state = { ...field.state, displayName: null };
    field.state.displayName = getFieldDisplayName(field, frame, frames);
  }
  return frames;
}

const CUSTOM = [
  'drawStyle', 'lineWidth', 'lineStyle', 'fillOpacity', 'showPoints', 'thresholdsStyle', 'cellOptions', 'minWidth', 'width',
  'axisSoftMin', 'axisSoftMax', 'axisWidth', 'spanNulls', 'axisPlacement', 'stacking', 'lineInterpolation', 'gradientMode',
];
function addCustom(builder) {
  for (const path of CUSTOM) {
    builder.addCustomEditor({ id: path, path, name: path, editor: () => null, override: () => null, process: (value) => value, shouldApply: () => true });
  }
}

function Graph({ panel, data, width, height, marks }) {
  if (!data.length) return <Nothing panel={panel} />;
  for (const frame of data) for (const field of frame.fields) {
    field.config.custom = { drawStyle: 'line', lineWidth: 1, fillOpacity: 0, showPoints: 'never', spanNulls: false, lineInterpolation: 'linear', ...field.config.custom };
  }
  return (
    <TimeSeries frames={data} timeRange={timeRange} timeZone="utc" width={width} height={height} legend={panel.options.legend} options={panel.options}>
      {(config) => withMarks(config, marks, theme) && null}
    </TimeSeries>
  );
}

function Figure({ panel, data, width, height }) {
  const values = getFieldDisplayValues({
    data, fieldConfig: panel.fieldConfig, reduceOptions: panel.options.reduceOptions, replaceVariables: (text) => text, theme, timeZone: 'utc',
  });
  return (
    <VizRepeater getValues={() => values} source={data} width={width} height={height} itemSpacing={3} orientation="auto" autoGrid
      renderValue={({ value, width: each, height: tall, count }) => (
        <BigValue value={value.display} count={count} width={each} height={tall} theme={theme} textMode={panel.options.textMode}
          colorMode={panel.options.colorMode} graphMode="none" justifyMode="auto" />
      )} />
  );
}

function Rows({ panel, data, width, height }) {
  const frame = data[0];
  if (!frame?.length) return <Nothing panel={panel} />;
  return (
    <TableNG data={frame} width={width} height={height} cellHeight={panel.options.cellHeight} sortBy={panel.options.sortBy}
      timeRange={timeRange} fieldConfig={panel.fieldConfig} structureRev={1} />
  );
}

function States({ panel, data, width, height, marks }) {
  if (!data.length) return <Nothing panel={panel} />;
  return <Bands panel={panel} data={data} width={width} height={height} theme={theme} from={from} to={to} marks={marks} />;
}

const Nothing = ({ panel }) => (
  <div style={{ display: 'flex', height: '100%', alignItems: 'center', justifyContent: 'center', color: theme.colors.text.secondary, textAlign: 'center' }}>
    {panel.fieldConfig.defaults.noValue || 'No data'}
  </div>
);

const KINDS = { timeseries: Graph, stat: Figure, table: Rows, 'state-timeline': States };

function Panel({ panel, unit, marks }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: GAP / 2 + x * unit + GAP / 2, top: y * (CELL + GAP), width: w * unit - GAP, height: h * (CELL + GAP) - GAP };
  if (panel.type === 'row') {
    return <div style={{ ...place, font: `500 16px/30px ${theme.typography.fontFamily}`, color: theme.colors.text.primary }}>{panel.title}</div>;
  }
  const Kind = KINDS[panel.type];
  return (
    <div style={place}>
      <PanelChrome title={panel.title} width={place.width} height={place.height} padding={panel.type === 'stat' ? 'none' : 'md'}>
        {(width, height) => <Kind panel={panel} data={panel.data} width={width} height={height} marks={marks} />}
      </PanelChrome>
    </div>
  );
}

// Grafana's own head has menus; here it says what is shown.
function Head({ dashboard }) {
  const chosen = [...asked].filter(([name]) => name === 'var-instance').map(([, value]) => value);
  return (
    <div style={{ height: HEADER, padding: `0 ${GAP}px`, font: `500 18px/${HEADER}px ${theme.typography.fontFamily}`, color: theme.colors.text.primary }}>
      {dashboard.title}
      <span style={{ marginLeft: 16, fontSize: 14, color: theme.colors.text.secondary }}>Instance: {chosen[0] ?? 'All'}</span>
    </div>
  );
}

async function main() {
  await initPluginTranslations('kvwatch', []);
  dataAll.setTimeZoneResolver?.(() => 'utc');
  standardEditorsRegistry.setInit(() => []);
  standardFieldConfigEditorRegistry.setInit(standardConfigs);
  const known = new Map(Object.values(dataAll.standardTransformers).map((one) => [one.id, one])); // one stands there twice
  standardTransformersRegistry.setInit(() => [...known.values()].map((transformation) => ({ id: transformation.id, name: transformation.name, transformation: async () => transformation })));
  const dashboard = await (await fetch(asked.get('dashboard'))).json();
  await document.fonts.load(`12px Inter`);
  await document.fonts.load(`500 12px Inter`);
  for (const panel of dashboard.panels.filter((one) => one.type !== 'row')) panel.data = await prepared(panel);
  const marks = await marksOf(dashboard.annotations.list, from, to);
  const unit = (innerWidth - GAP) / COLUMNS;
  const bottom = Math.max(...dashboard.panels.map((panel) => panel.gridPos.y + panel.gridPos.h)) * (CELL + GAP);
  Object.assign(document.body.style, { background: theme.colors.background.canvas, margin: 0 });
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <Head dashboard={dashboard} />
      <div style={{ position: 'relative', height: bottom }}>
        {dashboard.panels.map((panel) => <Panel key={panel.id} panel={panel} unit={unit} marks={marks} />)}
      </div>
    </ThemeContext.Provider>,
  );
  document.title = `drawn ${HEADER + bottom}`;
}

// Standard options of a field, as Grafana registers them: how a value of fieldConfig becomes part of a field.
function standardConfigs() {
  return ['unit', 'min', 'max', 'decimals', 'displayName', 'noValue', 'thresholds', 'mappings', 'color', 'links', 'description', 'filterable'].map((id) => ({
    id, path: id, name: id, editor: () => null, override: () => null, process: (value) => value, shouldApply: () => true,
  }));
}

const failed = (error) => { document.title = `failed ${error.message}`; };
addEventListener('error', failed);
main().catch(failed);
